"""What a step uploads: a few numbers a request, packed into one copy, from which the device lays out the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of one packed int32 buffer, on the device or, alike, on the host; see `kernels.expand_tokens`."""

    owners: Tensor  # [tokens]
    given: Tensor  # [tokens]
    query_starts: Tensor  # [requests + 1]
    starts: Tensor  # [requests]
    slots: Tensor  # [requests]

    @classmethod
    def within(cls, buffer: Tensor, shape: StepShape) -> StepInputs:
        """The parts of `buffer` for a step of this shape."""
        sizes = (shape.tokens, shape.tokens, shape.requests + 1, shape.requests, shape.requests)
        return cls(*torch.split(buffer[: sum(sizes)], list(sizes)))

    @staticmethod
    def size(shape: StepShape) -> int:
        """Numbers that a step of this shape uploads."""
        return 2 * shape.tokens + 3 * shape.requests + 1


def pack(
    into: NDArray[np.int32],
    shape: StepShape,
    chunks: Sequence[Chunk],
    slots: Sequence[int],
    spare_slot: int,
    known: Mapping[EngineRequest, int],
) -> None:
    """Writes the step's numbers to `into` [size]. `known` has pending tokens that the host knows all the same.

    Padding is of requests without tokens, in `spare_slot`, and of tokens that are nobody's.
    """
    count, padding = len(chunks), shape.requests - len(chunks)
    lengths = [chunk.num_tokens for chunk in chunks]
    total = sum(lengths)
    owners, given, query_starts, starts, of_slot = np.split(
        into, np.cumsum([shape.tokens, shape.tokens, shape.requests + 1, shape.requests])
    )
    owners[:total] = np.arange(count) if shape.decodes else np.repeat(np.arange(count), lengths)
    owners[total:] = -1
    given[:total] = _token_ids(chunks, known)
    given[total:] = 0
    query_starts[0] = 0
    query_starts[1 : count + 1] = np.cumsum(lengths)
    query_starts[count + 1 :] = total
    starts[:] = [chunk.start for chunk in chunks] + [0] * padding
    of_slot[:] = [*slots, *[spare_slot] * padding]


def _token_ids(chunks: Sequence[Chunk], known: Mapping[EngineRequest, int]) -> list[int]:
    """-1 where the device knows."""
    token_ids: list[int] = []
    for chunk in chunks:
        tokens = chunk.request.tokens
        if chunk.num_tokens == 1 and chunk.start < len(tokens):
            token_ids.append(tokens[chunk.start])
            continue
        token_ids += tokens[chunk.start : chunk.end]
        if chunk.end > len(tokens):
            token_ids.append(known.get(chunk.request, -1))
    return token_ids


TABLE_ENTRIES = 4096
"""Entries of block tables that a step's staging holds: prompts of 65,536 tokens together. More take another way."""


class Staging:
    """Pinned host memory of one step on its way to the device. It is used again when the step has retired."""

    def __init__(self, ints: int, longs: int, results: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.ints = torch.empty(ints, dtype=torch.int32, pin_memory=pinned)
        self.longs = torch.empty(longs, dtype=torch.int64, pin_memory=pinned)
        self.results = torch.empty(results, dtype=torch.int64, pin_memory=pinned)
        self.entries = torch.empty(2 * TABLE_ENTRIES, dtype=torch.int64, pin_memory=pinned)
        self.ints_array: NDArray[np.int32] = self.ints.numpy()
        self.longs_array: NDArray[np.int64] = self.longs.numpy()
