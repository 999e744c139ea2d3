"""Attention over the paged pool by the Triton kernels: each request by the one made for its number of tokens."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.attention_decode import decode_attention
from paceline.kernels.attention_prefill import prefill_attention
from paceline.kernels.modes import batch_invariant
from paceline.kernels.paged_plan import PagedPlan


def attention(qkv: Tensor, pool: Tensor, layer: int, plan: PagedPlan, scale: float | None = None) -> Tensor:
    """As its twin; rows of no request are left as they come."""
    tokens, all_heads, head_dim = qkv.shape
    out = torch.empty((tokens, (all_heads - 2 * pool.shape[1]) * head_dim), dtype=qkv.dtype, device=qkv.device)
    log2_scale = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
    if batch_invariant():
        prefill_attention(qkv, pool, layer, replace(plan, few=0), log2_scale, out)
        return out
    if plan.few:
        decode_attention(qkv, pool, layer, plan, log2_scale, out)
    if plan.prefills:
        prefill_attention(qkv, pool, layer, plan, log2_scale, out)
    return out
