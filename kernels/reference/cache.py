"""Rotary positions and what enters the KV pool, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_tables(
    head_dim: int,
    context_tokens: int,
    theta: float,
    device: torch.device | None = None,
    factors: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles, both [context_tokens, head_dim / 2], float32.

    `factors`, where there are any, divide the frequencies: one for each.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if factors:
        inverse /= torch.tensor(factors, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32, device=device), inverse)
    return angles.cos(), angles.sin()


def store_rows(slots: Tensor, pool: Tensor) -> Tensor:
    """Where layer 0 keeps the tokens: row numbers in the pool as rows of `head_dim`.

    `slots` [tokens] is block id * block_tokens + place in the block. -> [tokens, 2 * kv_heads]: keys' rows, then
    values'.
    """
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    head = torch.arange(kv_heads, device=slots.device).repeat(2)
    part = torch.arange(2, device=slots.device).repeat_interleave(kv_heads)
    block, place = (slots // block_tokens)[:, None], (slots % block_tokens)[:, None]
    return ((block * kv_heads + head) * layers * 2 + part) * block_tokens + place


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, pool: Tensor, layer: int) -> None:
    """Turns queries and keys in place (halves, as Hugging Face lays them out) and writes keys and values into the pool.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim]; `cos`, `sin` [tokens, head_dim / 2]; `rows` as `store_rows` gives
    them, of real tokens only.
    """
    *_, block_tokens, head_dim = pool.shape
    num_stored = rows.shape[1]
    turned = qkv[:, : qkv.shape[1] - num_stored // 2]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    new_first = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(new_first)
    stored = qkv[:, qkv.shape[1] - num_stored :].reshape(-1, head_dim)
    pool.view(-1, head_dim).index_copy_(0, (rows + layer * 2 * block_tokens).view(-1), stored)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, all layers and heads, within the pool.

    `sources` and `targets` int64 [pairs]; no block is both, and a target appears once. Pairs with a negative source
    are padding.
    """
    real = sources >= 0
    pool[targets[real]] = pool[sources[real]]
