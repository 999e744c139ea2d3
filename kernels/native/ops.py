"""The twins' names over the C functions; what these do not take, or do no faster, goes to the twin."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.kernels import reference
from paceline.kernels.native.library import library
from paceline.kernels.native.operands import is_bfloat16, supported
from paceline.kernels.native.quantised import quantised_linear, quantised_of

FEW_ROWS: Final = 24
"""Rows up to which the C product is the faster one; beyond, a blocked product reuses what it has in cache better."""
_BAND: Final = 8
_LANES: Final = 16
_MOST_INPUTS: Final = 32_768
_FEW_TOKENS: Final = 64
"""Tokens up to which the element-wise functions beat torch's, which share many rows out among threads."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its twin."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    even = outputs % _BAND == 0 and inputs % _LANES == 0 and inputs <= _MOST_INPUTS
    if not (0 < rows <= FEW_ROWS and even and x.dim() == 2 and supported(x, weight, bias)):
        return reference.linear(x, weight, bias)
    if (stored := quantised_of(weight)) is not None:
        return quantised_linear(x, stored, bias, outputs)
    wide = x.float()
    out = x.new_empty(rows, outputs)
    library().skinny_linear(
        wide.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        inputs,
        outputs,
        is_bfloat16(weight),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its twin."""
    if not (x.dim() == 2 and x.shape[0] <= _FEW_TOKENS and supported(x, weight)):
        return reference.rms_norm(x, weight, eps)
    return _norm(None, x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its twin."""
    if not (x.dim() == 2 and x.shape[0] <= _FEW_TOKENS and supported(x, residual, weight)):
        return reference.add_rms_norm(x, residual, weight, eps)
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(residual)
    library().add_rms_norm(
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *residual.shape,
        eps,
        is_bfloat16(residual),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """As its twin."""
    rows, width = gate_up.shape[0], gate_up.shape[-1] // 2
    if not (gate_up.dim() == 2 and width % _LANES == 0 and supported(gate_up)):
        return reference.swiglu(gate_up)
    out = gate_up.new_empty(rows, width)
    library().swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width, is_bfloat16(gate_up))
    return out


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, pool: Tensor, layer: int) -> None:
    """As its twin."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = rows.shape[1] // 2
    plain = supported(qkv, pool) and supported(cos, sin) and cos.dtype is torch.float32 and rows.is_contiguous()
    if not (plain and head_dim % 2 == 0):
        reference.rope_and_store(qkv, cos, sin, rows, pool, layer)
        return
    library().rope_and_store(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows.data_ptr(),
        pool.data_ptr(),
        layer * 2 * pool.shape[-2],
        tokens,
        all_heads - 2 * kv_heads,
        kv_heads,
        head_dim,
        is_bfloat16(qkv),
    )
