"""Greedy answers straight from a model, prompts computed in chunks of a given size, to compare with an oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.engine.batch import build_batch
from paceline.engine.block_pool import BlockPool
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.runner import Runner
from paceline.types import RequestId, SamplingParams, blocks_for


@dataclass(slots=True)
class Answer:
    """The tokens after one prompt, and the log-probabilities that each was chosen from, [vocab]."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)


def blocks_needed(prompts: Sequence[list[int]], *, new_tokens: int, groups: int = 1) -> int:
    """Blocks of the pool that `answers` takes at most."""
    return groups * sum(blocks_for(len(prompt) + new_tokens) for prompt in prompts)


@torch.inference_mode()
def answers(runner: Runner, prompts: Sequence[list[int]], *, chunk: int, new_tokens: int = 1) -> list[Answer]:
    """All prompts at once, each advancing by `chunk` tokens a step until it is done with its prompt.

    What slides out of a window is let go of after each step, and taken by whoever needs a block next.
    """
    groups = runner.groups
    pool = BlockPool(runner.pool.shape[0], groups=len(groups))
    requests = [
        EngineRequest(RequestId(str(index)), list(prompt), len(prompt), SamplingParams(), pool.lease(0))
        for index, prompt in enumerate(prompts)
    ]
    found = [Answer() for _ in prompts]
    while unfinished := [index for index, answer in enumerate(found) if len(answer.token_ids) < new_tokens]:
        step = [
            Chunk(requests[index], requests[index].computed, min(chunk, requests[index].remaining))
            for index in unfinished
        ]
        for part in step:
            part.request.lease.grow_to(blocks_for(part.end))
        logits = runner.model.forward(build_batch(step, runner.pool, groups.windows), runner.pool, lambda: None)
        sampling = [index for index, part in zip(unfinished, step, strict=True) if part.samples]
        for part in step:
            part.request.computed = part.end
            part.request.lease.slide(groups.first_read(part.end))
        for index, logprobs in zip(sampling, logits.log_softmax(-1), strict=True):
            token_id = int(logprobs.argmax())
            found[index].token_ids.append(token_id)
            found[index].logprobs.append(logprobs)
            requests[index].tokens.append(token_id)
    return found


@torch.inference_mode()
def expected(oracle: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """A transformers model's log-probabilities where each token of `answer` was chosen, [tokens, vocab].

    Each row's most likely token being the answer's, by induction, the oracle answers the same.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits: Tensor = oracle(ids, logits_to_keep=len(answer)).logits[0]
    return logits.float().log_softmax(-1)
