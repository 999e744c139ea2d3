"""Decode attention where the keys lie: a step's block tables as C reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.native.library import library
from paceline.kernels.native.operands import is_bfloat16, supported

MOST_HEAD_DIM = 256
MOST_BLOCK_TOKENS = 64
_LANES = 16  # of the widest vectors


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step in which every request has one token."""

    tables: Tensor  # int32 [requests, blocks], padded with anything
    firsts: Tensor  # int32 [requests], the first token that is seen
    contexts: Tensor  # int32 [requests], tokens stored, the step's own among them


def plan_decode(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    pool: Tensor,
    window: int | None = None,
) -> DecodePlan | None:
    """As `kernels.plan_attention`; None for a step that is left to the twin: one with prompts, or an odd shape."""
    *_, block_tokens, head_dim = pool.shape
    fits = head_dim % _LANES == 0 and head_dim <= MOST_HEAD_DIM and block_tokens <= MOST_BLOCK_TOKENS
    if not (fits and supported(pool) and lengths and all(length == 1 for length in lengths)):
        return None
    used = [start // block_tokens + 1 for start in starts]
    width = max(used)
    padded = [
        [*table[:blocks], *[0] * (width - min(blocks, len(table)))] for table, blocks in zip(tables, used, strict=True)
    ]
    firsts = [0 if window is None else max(0, start + 1 - window) for start in starts]
    return DecodePlan(
        tables=torch.tensor(padded, dtype=torch.int32),
        firsts=torch.tensor(firsts, dtype=torch.int32),
        contexts=torch.tensor([start + 1 for start in starts], dtype=torch.int32),
    )


def decode_attention(qkv: Tensor, pool: Tensor, layer: int, plan: DecodePlan, scale: float | None = None) -> Tensor:
    """As `kernels.attention`."""
    _, kv_heads, layers, _, block_tokens, head_dim = pool.shape
    requests = qkv.shape[0]
    heads = qkv.shape[1] - 2 * kv_heads
    assert qkv.is_contiguous() and qkv.dtype == pool.dtype, "the model's own, as the product made it"
    out = qkv.new_empty(requests, heads * head_dim)
    head_stride = layers * 2 * block_tokens * head_dim
    library().decode_attention(
        qkv.data_ptr(),
        pool.data_ptr(),
        plan.tables.data_ptr(),
        plan.firsts.data_ptr(),
        plan.contexts.data_ptr(),
        out.data_ptr(),
        requests,
        plan.tables.shape[1],
        heads,
        kv_heads,
        head_dim,
        block_tokens,
        kv_heads * head_stride,
        head_stride,
        layer * 2 * block_tokens * head_dim,
        head_dim**-0.5 if scale is None else scale,
        is_bfloat16(pool),
    )
    return out
