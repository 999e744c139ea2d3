"""The dense product in batch-invariant mode: a row's sum is made in one order, however many rows there are.

The inputs are cut into pieces by the product's size alone. With few rows each piece has a program, and the last to
finish adds them up; with many, one program sums piece after piece: both add the same numbers in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, launch, upcast
from paceline.kernels.skinny_linear import counters, load_rows, store_rows, sum_pieces

_ROWS = 64
_OUTPUTS = 128
_INPUTS = 64
_PROGRAMS = 264  # two on each of an H200's 132 multiprocessors
_FEWEST_STEPS = 8  # of a piece's loop


@triton.jit
def _tile(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    arrivals: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    splits: tl.tensor,
    tiles: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    place = tl.program_id(0)
    tile = place % tiles
    row = tl.arange(0, ROWS)
    output = place // tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    x += tile.to(tl.int64) * ROWS * x_stride
    out += tile.to(tl.int64) * ROWS * outputs
    rows -= tile * ROWS
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), splits) * INPUTS
    known = (output < outputs)[:, None]
    weight_row = weight + output.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first_split = tl.program_id(1)
    last_split = first_split + 1 if SHARED else splits
    for split in range(first_split, last_split):
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for first in range(split * share, tl.minimum(inputs, (split + 1) * share), INPUTS):
            column = first + tl.arange(0, INPUTS)
            w = tl.load(weight_row + column[None, :], mask=known & (column < inputs)[None, :], other=0.0)
            if UPCAST:
                w = w.to(tl.float32)
            found = load_rows(x, x_stride, row, rows, column, inputs, False, UPCAST)
            acc = tl.dot(w, found, acc, input_precision="ieee")
        total += acc
    if not SHARED:
        store_rows(total, out, bias, row, rows, output, outputs, HAS_BIAS)
        return

    own = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
    first_piece = place * splits * OUTPUTS * ROWS
    tl.store(pieces + first_piece + first_split * OUTPUTS * ROWS + own, total)
    tl.debug_barrier()  # All of the program's threads have stored before the one that counts it in.
    if tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu") == splits - 1:
        joined = sum_pieces(pieces, first_piece, OUTPUTS * ROWS, ROWS, row, splits, OUTPUTS)
        store_rows(joined, out, bias, row, rows, output, outputs, HAS_BIAS)
        tl.store(arrivals + place, 0)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`paceline.kernels.linear` of any number of rows."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    tiles, bands = triton.cdiv(rows, _ROWS), triton.cdiv(outputs, _OUTPUTS)
    steps = triton.cdiv(inputs, _INPUTS)
    splits = max(1, min(_PROGRAMS // bands, steps // _FEWEST_STEPS))
    shared = splits > 1 and tiles == 1
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    room = bands * splits * _OUTPUTS * _ROWS if shared else 1
    launch(
        _tile,
        (tiles * bands, splits if shared else 1),
        x,
        weight,
        weight if bias is None else bias,
        out,
        torch.empty(room, dtype=torch.float32, device=x.device),
        counters(x.device, bands),
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        splits,
        tiles,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        SHARED=shared,
        HAS_BIAS=bias is not None,
        UPCAST=upcast(x),
        num_warps=8,
        num_stages=1 if INTERPRETED else 4 if x.element_size() == 2 else 2,
    )
    return out
