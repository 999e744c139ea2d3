"""When a generation ends: one pure rule, for every tier.

The prefill tier applies it to the first token, so that a request which that token ends never lands on a decode worker.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.types import FinishReason, SamplingParams


def finish_reason(
    token_id: int,
    *,
    num_prompt: int,
    num_output: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    context_tokens: int,
) -> FinishReason | None:
    """Why the request ends with `token_id`, its `num_output`-th output token (from 1), or None while it goes on.

    A token that stops the request is part of its output.
    """
    stops = token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
    if stops and num_output > sampling.min_tokens:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or num_prompt + num_output >= context_tokens:
        return FinishReason.LENGTH
    return None
