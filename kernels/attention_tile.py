"""What both attention kernels do with a tile of keys: read it through the block table, and fold it into the softmax.

A program's rows are the queries of one KV head: `row // GROUP` is the query, `row % GROUP` which of the heads that
share the KV head; so one product serves the whole group. Sums are kept in float32, exponentials are powers of two.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, power_of_two


@triton.jit
def load_queries(
    qkv: tl.tensor,
    row_stride: tl.tensor,
    first_row: tl.tensor,
    query: tl.tensor,
    head: tl.tensor,
    real: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """[rows, DIM], zeros where not `real`."""
    dim = tl.arange(0, DIM)
    at = qkv + (first_row + query).to(tl.int64)[:, None] * row_stride + head[:, None] * HEAD_DIM + dim[None, :]
    found = tl.load(at, mask=real[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return found.to(tl.float32) if UPCAST else found


@triton.jit
def fold_tile(
    q: tl.tensor,
    acc: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    first_key: tl.tensor,
    lowest: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    window: tl.tensor,
    keys_of_layer: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    KEYS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running sums (acc [rows, DIM], most [rows], total [rows]) with keys from `first_key` to `end`, at most KEYS.

    Of those before `lowest`, which are before every row's window, nothing is read.
    Without MASKED, every key is before `end` and seen by every row.
    """
    key = first_key + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    stored = key < end
    if WINDOWED:
        stored = stored & (key >= lowest)
    if MASKED:
        block = tl.load(table + key // BLOCK_TOKENS, mask=stored, other=0)
    else:
        block = tl.load(table + key // BLOCK_TOKENS)
    at = block.to(tl.int64) * block_stride + (key % BLOCK_TOKENS) * HEAD_DIM
    to_k = keys_of_layer + at[:, None] + dim[None, :]
    if MASKED:
        inside = stored[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(to_k, mask=inside, other=0.0)
        v = tl.load(to_k + BLOCK_TOKENS * HEAD_DIM, mask=inside, other=0.0)
    elif HEAD_DIM != DIM:
        inside = (dim < HEAD_DIM)[None, :]
        k = tl.load(to_k, mask=inside, other=0.0)
        v = tl.load(to_k + BLOCK_TOKENS * HEAD_DIM, mask=inside, other=0.0)
    else:
        k = tl.load(to_k)
        v = tl.load(to_k + BLOCK_TOKENS * HEAD_DIM)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = stored[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_most = tl.maximum(most, tl.max(scores, axis=1))
    # A row that has seen no key yet has -inf: subtracting that from itself would be NaN.
    base = tl.where(new_most == float("-inf"), 0.0, new_most) if MASKED else new_most
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(most - base)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_most, total * fade + tl.sum(weights, axis=1)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel is cut up; numbers that were measured belong here, none is found while serving."""

    rows: int  # queries times heads of a program
    keys: int  # keys of a step of its loop
    warps: int
    stages: int


def tile_shape(rows: int, pool: Tensor) -> TileShape:
    """For at most `rows` rows a program: what fits into a multiprocessor's registers and shared memory."""
    dim = power_of_two(pool.shape[-1])
    if INTERPRETED:
        return TileShape(rows, 32, 1, 1)
    if pool.dtype == torch.float32:
        return TileShape(rows, 32 if dim > 64 else 64, 8 if rows > 32 else 4, 1 if dim > 128 else 2)
    keys = 32 if dim > 128 and rows > 64 else 64
    return TileShape(rows, keys, 8 if rows * dim > 64 * 128 else 4, 2 if dim > 128 else 3)


def decode_tile(rows: int, pool: Tensor, splits: int) -> TileShape:
    """For a decode's program: of shared contexts each reads too little for deep pipelining to pay."""
    shape = tile_shape(rows, pool)
    return replace(shape, stages=2) if splits > 1 and shape.stages > 2 else shape
