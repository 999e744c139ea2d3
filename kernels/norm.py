"""RMS norms: one program a row, which it reads once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch, narrow, overlaps, power_of_two, start_next, wait_for_last


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real = column < width
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    values = tl.load(x + row * x_stride + column, mask=real, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        # The sum as it is kept, rounded: the next layers read that one.
        kept = narrow(tl.load(at, mask=real, other=0.0).to(tl.float32) + values, residual)
        tl.store(at, kept, mask=real)
        values = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = narrow(values * scale, out).to(tl.float32) * factor
    tl.store(out + row * width + column, narrow(normed, out), mask=real)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = rows if residual is None else residual
    block = power_of_two(width)
    launch(
        _rms_norm,
        (rows.shape[0],),
        rows,
        summed,
        weight,
        out,
        rows.stride(0),
        summed.stride(0),
        width,
        eps,
        WIDTH=block,
        ADD=residual is not None,
        OVERLAP=overlaps(x),
        launch_pdl=overlaps(x),
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its twin."""
    return _run(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its twin."""
    return _run(x, residual, weight, eps)


@triton.jit
def _qk_norm(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    token_stride: tl.tensor,
    heads: tl.tensor,
    normed_heads: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    inside = dim[None, :] < HEAD_DIM
    real = (head < normed_heads)[:, None] & inside
    is_query = (head < heads)[:, None]
    at = qkv + token * token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    values = tl.load(at, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)
    of_query = tl.load(q_weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    of_key = tl.load(k_weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    factor = tl.where(is_query, of_query[None, :], of_key[None, :])
    normed = narrow(values * scale[:, None], qkv).to(tl.float32) * factor
    tl.store(at, narrow(normed, qkv), mask=real)


def qk_norm(qkv: Tensor, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """As its twin."""
    tokens, all_heads, head_dim = qkv.shape
    normed_heads = all_heads - kv_heads
    chunk = power_of_two(min(normed_heads, 8))
    launch(
        _qk_norm,
        (tokens, triton.cdiv(normed_heads, chunk)),
        qkv,
        q_weight,
        k_weight,
        qkv.stride(0),
        normed_heads - kv_heads,
        normed_heads,
        eps,
        HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim),
        HEADS=chunk,
        OVERLAP=overlaps(qkv),
        launch_pdl=overlaps(qkv),
    )
