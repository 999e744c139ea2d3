"""The dense product with few rows, where reading the weights is all the time there is.

Each program streams one band of outputs, or one piece of it along the inputs, through the matrix unit with the weights
on its long side: [OUTPUTS, INPUTS] x [INPUTS, rows]. Where a band is split, the last of its programs to finish adds the
pieces up, always in the same order.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gemv import multiply
from paceline.kernels.launch import (
    fetch_ahead,
    launch,
    narrow,
    overlaps,
    power_of_two,
    start_next,
    upcast,
    wait_for_last,
)
from paceline.kernels.linear_shapes import GemvShape, StreamShape, choose
from paceline.kernels.modes import batch_invariant

MOST_ROWS = 144
"""Rows that the kernel takes: sixteen requests of nine tokens."""
_LINE = tl.constexpr(64)  # two-byte elements of a cache line


@triton.jit
def load_rows(
    x: tl.tensor,
    row_stride: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """A piece of `x`, [column, row], zeros outside."""
    at = x + row[None, :] * row_stride + column[:, None]
    inside = (row < rows)[None, :]
    found = tl.load(at, mask=inside if EVEN else inside & (column < columns)[:, None], other=0.0)
    return found.to(tl.float32) if UPCAST else found


@triton.jit
def store_rows(
    acc: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Writes `acc` [output, row], with the bias, into `out` [rows, outputs]."""
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    inside = (row < rows)[None, :] & (output < outputs)[:, None]
    tl.store(out + row[None, :].to(tl.int64) * outputs + output[:, None], narrow(acc, out), mask=inside)


@triton.jit
def sum_pieces(
    piece: tl.tensor,
    first: tl.tensor,
    band: tl.tensor,
    wide: tl.tensor,
    row: tl.tensor,
    splits: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> tl.tensor:
    """The pieces of a band, [OUTPUTS, row]: read past the first cache, which may hold what was there before."""
    output = tl.arange(0, OUTPUTS)
    at = first + output[:, None] * wide + row[None, :]
    acc = tl.load(piece + at, cache_modifier=".cg")
    for split in range(1, splits):
        acc += tl.load(piece + at + split * band, cache_modifier=".cg")
    return acc


@triton.jit
def _stream(
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
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    band = tl.program_id(0)
    split = tl.program_id(1)
    output = band * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    # Rows past a power of two, of which there are few, are a second product with the same weights.
    if TAIL > 0:
        tail_row = ROWS + tl.arange(0, TAIL)
        tail = tl.zeros([OUTPUTS, TAIL], tl.float32)
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), splits) * INPUTS
    end = tl.minimum(inputs, (split + 1) * share)
    known = (output < outputs)[:, None]
    weight_row = weight + output.to(tl.int64)[:, None] * weight_stride
    if OVERLAP:
        # Weights hang on no kernel before: the first of them are on their way while the last one ends.
        line = split * share + tl.arange(0, AHEAD * INPUTS // _LINE) * _LINE
        fetch_ahead(weight_row + tl.minimum(line, inputs - 1)[None, :])
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    for first in range(split * share, end, INPUTS):
        column = first + tl.arange(0, INPUTS)
        inside = known if EVEN else known & (column < inputs)[None, :]
        w = tl.load(weight_row + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        if UPCAST:
            w = w.to(tl.float32)
        acc = tl.dot(w, load_rows(x, x_stride, row, rows, column, inputs, EVEN, UPCAST), acc, input_precision="ieee")
        if TAIL > 0:
            more = load_rows(x, x_stride, tail_row, rows, column, inputs, EVEN, UPCAST)
            tail = tl.dot(w, more, tail, input_precision="ieee")
    if not SPLIT:
        store_rows(acc, out, bias, row, rows, output, outputs, HAS_BIAS)
        if TAIL > 0:
            store_rows(tail, out, bias, tail_row, rows, output, outputs, HAS_BIAS)
        return

    WIDE: tl.constexpr = ROWS + TAIL
    place = tl.arange(0, OUTPUTS)[:, None] * WIDE
    first_piece = band * splits * OUTPUTS * WIDE
    own = pieces + first_piece + split * OUTPUTS * WIDE + place
    tl.store(own + row[None, :], acc)
    if TAIL > 0:
        tl.store(own + tail_row[None, :], tail)
    tl.debug_barrier()  # All of the program's threads have stored before the one that counts it in.
    if tl.atomic_add(arrivals + band, 1, sem="acq_rel", scope="gpu") == splits - 1:
        acc = sum_pieces(pieces, first_piece, OUTPUTS * WIDE, WIDE, row, splits, OUTPUTS)
        store_rows(acc, out, bias, row, rows, output, outputs, HAS_BIAS)
        if TAIL > 0:
            tail = sum_pieces(pieces, first_piece, OUTPUTS * WIDE, WIDE, tail_row, splits, OUTPUTS)
            store_rows(tail, out, bias, tail_row, rows, output, outputs, HAS_BIAS)
        tl.store(arrivals + band, 0)


_arrivals: dict[tuple[torch.device, int, int], Tensor] = {}


def counters(device: torch.device, bands: int) -> Tensor:
    """Zeros, which every product leaves as zeros: one set a stream, on which products follow each other.

    RuntimeError where a graph is being captured and there is no set yet: its memory would be the graph's, zeroed by
    that graph's replays alone, and every graph captured later would count on what happens to lie there.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, power_of_two(bands, 4096))
    if key not in _arrivals:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product is to be computed on the capturing stream before it is captured there")
        _arrivals[key] = torch.zeros(key[2], dtype=torch.int32, device=device)
    return _arrivals[key]


def stream_weights(x: Tensor, weight: Tensor, bias: Tensor | None, shape: StreamShape) -> Tensor:
    """`linear` of `x` [rows, inputs] by the kernel, cut up as `shape` says."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    bands = triton.cdiv(outputs, shape.outputs)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    room = bands * shape.splits * shape.outputs * (shape.rows + shape.tail) if shape.splits > 1 else 1
    pieces = torch.empty(room, dtype=torch.float32, device=x.device)
    overlap = shape.ahead > 0 and x.element_size() == 2 and overlaps(x)
    launch(
        _stream,
        (bands, shape.splits),
        x,
        weight,
        weight if bias is None else bias,
        out,
        pieces,
        counters(x.device, bands),
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        shape.splits,
        ROWS=shape.rows,
        TAIL=shape.tail,
        OUTPUTS=shape.outputs,
        INPUTS=shape.inputs,
        SPLIT=shape.splits > 1,
        EVEN=inputs % shape.inputs == 0,
        HAS_BIAS=bias is not None,
        UPCAST=upcast(x),
        AHEAD=shape.ahead,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def has_kernel(rows: int, weight: Tensor) -> bool:
    """Whether `linear` of so many rows is a kernel of ours, not a library's."""
    outputs, inputs = weight.shape
    return batch_invariant() or choose(rows, outputs, inputs, weight.element_size()) is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its twin; where streaming the weights is not faster, it is cuBLAS's product."""
    if batch_invariant():
        from paceline.kernels.invariant_linear import invariant_linear  # It is made of this file's pieces.

        return invariant_linear(x, weight, bias)
    rows, inputs = x.shape
    shape = choose(rows, weight.shape[0], inputs, x.element_size()) if rows else None
    if shape is None:
        return F.linear(x, weight, bias)
    if isinstance(shape, GemvShape):
        return multiply(x, weight, bias, shape)
    return stream_weights(x, weight, bias, shape)
