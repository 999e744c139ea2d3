"""A step's attention as the Triton kernels read it: lengths and block tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW_QUERIES = 9
"""Most tokens of a request for which the decode kernel is used: a token and eight drafts."""
SPLIT_TOKENS = 64
"""Fewest context tokens worth a program of their own."""
_ENOUGH_PROGRAMS = 512  # about four on each of an H200's 132 multiprocessors: more splits only add to the reduction
_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Requests of a step, one after the other in its rows. A request without tokens is padding.

    Kernels read tensors alone, so that a captured graph follows what is written to them; the numbers bound its grids.
    """

    query_starts: Tensor  # int32 [requests + 1], each request's first row, and the end
    contexts: Tensor  # int32 [requests], tokens that are stored, the step's own among them
    tables: Tensor  # int32 [requests, blocks]
    window: int | None  # tokens that a token sees, itself among them
    few: int  # requests with at most so many tokens are the decode kernel's, FEW_QUERIES at most; 0: none is
    prefills: bool  # some request has more
    splits: int  # programs that share a decode's context


def count_splits(requests: int, kv_heads: int, longest: int) -> int:
    """Programs to share each context among: enough to fill a GPU, none with less than SPLIT_TOKENS.

    A power of two, since each number is a kernel to compile.
    """
    enough = _ENOUGH_PROGRAMS // max(1, requests * kv_heads)
    most = max(1, min(enough, -(-longest // SPLIT_TOKENS), _MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


def plan_pages(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    pool: Tensor,
    window: int | None = None,
) -> PagedPlan:
    """`paceline.kernels.plan_attention` for the Triton kernels."""
    query_starts = [0]
    for length in lengths:
        query_starts.append(query_starts[-1] + length)
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    longest = max((len(table) for table in tables), default=0)
    # What pads a table is never read.
    padded = [[*table, *[0] * (longest - len(table))] for table in tables]

    def on_device(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    reach = max(contexts, default=0)
    return PagedPlan(
        query_starts=on_device(query_starts),
        contexts=on_device(contexts),
        tables=on_device(padded),
        window=window,
        few=max((length for length in lengths if length <= FEW_QUERIES), default=0),
        prefills=any(length > FEW_QUERIES for length in lengths),
        splits=count_splits(len(lengths), pool.shape[1], reach if window is None else min(reach, window + FEW_QUERIES)),
    )
