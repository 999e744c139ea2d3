"""Paged attention for tests: requests in a poisoned pool, and what must come out, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.types import BLOCK_TOKENS

LAYERS = 2
LAYER = 1
"""The pool's layer that is filled; what is in the other must not matter."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Requests whose tokens are all in the pool's LAYER, and the rows of a step.

    Whatever no request may read is NaN: other blocks, other layers, and blocks before every window, which the tables
    no longer name.
    """

    qkv: Tensor  # [tokens, heads + 2 * kv_heads, head_dim]
    pool: Tensor
    starts: list[int]
    lengths: list[int]
    tables: list[list[int]]
    wanted: Tensor  # [tokens, heads * head_dim], float64

    @classmethod
    def random(
        cls,
        requests: Sequence[tuple[int, int]],
        *,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        scale: float | None = None,
        seed: int = 0,
    ) -> PagedCase:
        """`requests` are (tokens stored before the step, tokens in it)."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source).to(dtype)

        counts = [-(-(start + length) // BLOCK_TOKENS) for start, length in requests]
        order = (torch.randperm(sum(counts) + 3, generator=source) + 1).tolist()  # block 0 is no one's
        pool = torch.full((sum(counts) + 5, kv_heads, LAYERS, 2, BLOCK_TOKENS, head_dim), torch.nan, dtype=dtype)
        rows, outputs, tables = [], [], []
        for (start, length), count in zip(requests, counts, strict=True):
            table = [order.pop() for _ in range(count)]
            keys, values = normal(kv_heads, start + length, head_dim), normal(kv_heads, start + length, head_dim)
            queries = normal(kv_heads * group, length, head_dim)
            slid_out = 0 if window is None else max(0, start + 1 - window) // BLOCK_TOKENS
            for part, tokens in enumerate((keys, values)):
                # The last block's room past the tokens holds what an earlier owner left: numbers, for it is read.
                padded = torch.full((kv_heads, count * BLOCK_TOKENS, head_dim), 100.0, dtype=dtype)
                padded[:, : start + length] = tokens
                by_block = padded.view(kv_heads, count, BLOCK_TOKENS, head_dim).transpose(0, 1)
                pool[table[slid_out:], :, LAYER, part] = by_block[slid_out:]
            tables.append([0] * slid_out + table[slid_out:])
            rows.append(torch.cat([queries, keys[:, start:], values[:, start:]]).transpose(0, 1))
            outputs.append(dense_attention(queries, keys, values, window, scale))
        return cls(
            torch.cat(rows).contiguous().to(device),
            pool.to(device),
            [start for start, _ in requests],
            [length for _, length in requests],
            tables,
            torch.cat(outputs).to(device),
        )


def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """What the last `length` tokens see, in float64: [heads, length, dim], [kv_heads, context, dim] -> [length, heads *
    dim].
    """
    heads, length, head_dim = queries.shape
    context = keys.shape[1]
    keys = keys.double().repeat_interleave(heads // keys.shape[0], dim=0)
    values = values.double().repeat_interleave(heads // values.shape[0], dim=0)
    scores = queries.double() @ keys.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    distance = torch.arange(context - length, context)[:, None] - torch.arange(context)
    seen = (distance >= 0) & (distance < (context if window is None else window))
    found = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    return found.transpose(0, 1).reshape(length, heads * head_dim)
