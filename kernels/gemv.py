"""The dense product with one to four rows, on the plain arithmetic units: each program reads a few weights' rows whole.

All of a program's weights are on their way before it waits for the kernel that makes its inputs, so that where kernels
overlap (`paceline.kernels.launch.overlaps`) the memory is never idle between two products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch, narrow, overlaps, power_of_two, start_next, wait_for_last
from paceline.kernels.linear_shapes import GemvShape

MOST_ROWS = 4


@triton.jit
def _row(
    x: tl.tensor, row: tl.tensor, rows: tl.tensor, x_stride: tl.tensor, column: tl.tensor, inputs: tl.tensor
) -> tl.tensor:
    """A row's piece, [1, columns]; one past the last is the last."""
    at = x + tl.minimum(row, rows - 1) * x_stride + column
    return tl.load(at, mask=column < inputs, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _write(
    acc: tl.tensor,
    row: tl.constexpr,
    out: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    found = tl.sum(acc, axis=1)
    if HAS_BIAS:
        found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, narrow(found, out), mask=(output < outputs) & (row < rows))


@triton.jit
def _gemv(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = (output < outputs)[:, None]
    column = tl.arange(0, INPUTS)
    to_weight = weight + output.to(tl.int64)[:, None] * weight_stride
    w = tl.load(
        to_weight + column[None, :], mask=known & (column < inputs)[None, :], other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    acc0 = w * _row(x, 0, rows, x_stride, column, inputs)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    if ROWS > 1:
        acc1 = w * _row(x, 1, rows, x_stride, column, inputs)
    if ROWS > 2:
        acc2 = w * _row(x, 2, rows, x_stride, column, inputs)
        acc3 = w * _row(x, 3, rows, x_stride, column, inputs)
    for first in range(INPUTS, inputs, INPUTS):
        column = first + tl.arange(0, INPUTS)
        inside = known & (column < inputs)[None, :]
        w = tl.load(to_weight + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc0 += w * _row(x, 0, rows, x_stride, column, inputs)
        if ROWS > 1:
            acc1 += w * _row(x, 1, rows, x_stride, column, inputs)
        if ROWS > 2:
            acc2 += w * _row(x, 2, rows, x_stride, column, inputs)
            acc3 += w * _row(x, 3, rows, x_stride, column, inputs)
    _write(acc0, 0, out, bias, rows, output, outputs, HAS_BIAS)
    if ROWS > 1:
        _write(acc1, 1, out, bias, rows, output, outputs, HAS_BIAS)
    if ROWS > 2:
        _write(acc2, 2, out, bias, rows, output, outputs, HAS_BIAS)
        _write(acc3, 3, out, bias, rows, output, outputs, HAS_BIAS)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, shape: GemvShape) -> Tensor:
    """`paceline.kernels.linear` of at most MOST_ROWS rows."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert 0 < rows <= MOST_ROWS
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    launch(
        _gemv,
        (triton.cdiv(outputs, shape.outputs),),
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        ROWS=power_of_two(rows),
        OUTPUTS=shape.outputs,
        INPUTS=shape.inputs,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=shape.warps,
        launch_pdl=overlap,
    )
    return out
