"""Sampling behind a step on a GPU, in stream order: the host uploads what requests ask for, and waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import kernels
from paceline.engine.draw_inputs import pack, split
from paceline.engine.request import Chunk
from paceline.engine.step_inputs import Staging
from paceline.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities on their way into pinned memory: the drawn token's, and the most likely ones'."""

    drawn: Tensor  # float32 [requests]
    best: Tensor  # float32 [requests, most]
    best_ids: Tensor  # int64 [requests, most]

    def of(self, row: int, token_id: int, number: int) -> TokenLogprob:
        """What one row asked for, once it is there."""
        best_ids, best = self.best_ids[row, :number].tolist(), self.best[row, :number].tolist()
        return TokenLogprob(token_id, float(self.drawn[row]), tuple(zip(best_ids, best, strict=True)))


class DeviceSampler:
    """Draws for at most `max_requests` requests a step."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._greedy = torch.zeros(4 * max_requests, dtype=torch.int64, device=device)
        self._columns = torch.zeros(4 * max_requests, dtype=torch.int64, device=device)

    def rehearse(self, logits: Tensor) -> None:
        """Draws in the way that takes the most memory."""
        temperature, top_k, top_p, keys = split(self._columns, len(logits))
        drawn_with_a_cut = temperature.fill_(1.0), top_k.fill_(40), top_p.fill_(0.5), keys.zero_()
        kernels.sample_rows(logits, *drawn_with_a_cut)

    def draw(self, logits: Tensor, chunks: Sequence[Chunk], staging: Staging) -> tuple[Tensor, PendingLogprobs | None]:
        """Token ids int64 [requests] of `logits` [requests, vocab], of which the first rows are the chunks'.

        They are also on their way into the staging's results, as -1 where a row's logits are unusable.
        """
        samplings = [chunk.request.sampling for chunk in chunks]
        if all(sampling.greedy for sampling in samplings):
            temperature, top_k, top_p, keys = split(self._greedy, len(logits))
        else:
            temperature, top_k, top_p, keys = self._upload(chunks, len(logits), staging)
        token_ids, bad = kernels.sample_rows(
            logits,
            temperature,
            top_k if any(sampling.top_k for sampling in samplings) else None,
            top_p if any(sampling.top_p < 1.0 for sampling in samplings) else None,
            keys,
        )
        staging.results[: len(logits)].copy_(token_ids.masked_fill(bad, -1), non_blocking=True)
        return token_ids, _logprobs(logits[: len(chunks)], token_ids, samplings)

    def _upload(self, chunks: Sequence[Chunk], rows: int, staging: Staging) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(temperature, top_k, top_p, keys), each [rows], on the device; padding is greedy."""
        pack(staging.longs_array[: 4 * rows], rows, chunks)
        self._columns[: 4 * rows].copy_(staging.longs[: 4 * rows], non_blocking=True)
        return split(self._columns, rows)


def _logprobs(logits: Tensor, token_ids: Tensor, samplings: Sequence[SamplingParams]) -> PendingLogprobs | None:
    """As `token_logprobs`, of all rows where any asks: what is asked of a few rows costs a GPU little on the others."""
    asked = [each.logprobs for each in samplings if each.logprobs is not None]
    if not asked:
        return None
    logprobs = logits.float().log_softmax(-1)
    drawn = logprobs.gather(1, token_ids[: len(logits), None])[:, 0]
    best, best_ids = logprobs.topk(min(max(asked), logits.shape[1]))
    return PendingLogprobs(_download(drawn), _download(best), _download(best_ids))


def _download(values: Tensor) -> Tensor:
    """A pinned tensor that will hold the values when the stream has come so far."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return pinned.copy_(values, non_blocking=True)
