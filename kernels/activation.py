"""Gated activations: the two halves are read once and their product is written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch, narrow, overlaps, power_of_two, start_next, wait_for_last


@triton.jit
def _gated(
    gate_up: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = column < width
    at = gate_up + row * row_stride + column
    gate = tl.load(at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=real, other=0.0).to(tl.float32)
    # Both are gate times a logistic: gelu's 0.5 * (1 + tanh(y)) is the logistic of 2y, which never overflows to NaN.
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * width + column, narrow(gate / (1.0 + tl.exp(-slope)) * up, out), mask=real)


def _run(gate_up: Tensor, gelu: bool) -> Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(width))
    launch(
        _gated,
        (rows.shape[0], triton.cdiv(width, block)),
        rows,
        out,
        rows.stride(0),
        width,
        WIDTH=block,
        GELU=gelu,
        OVERLAP=overlaps(gate_up),
        launch_pdl=overlaps(gate_up),
        num_warps=4,
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """As its twin."""
    return _run(gate_up, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """As its twin."""
    return _run(gate_up, gelu=True)
