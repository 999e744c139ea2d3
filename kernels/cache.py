"""What enters the KV pool: rotary positions with the write, and copies of whole blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch, narrow, overlaps, power_of_two, start_next, wait_for_last

_COPY_BYTES = 16384  # a program's share of a block


@triton.jit
def _rope_and_store(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rows: tl.tensor,
    pool: tl.tensor,
    token_stride: tl.tensor,
    angle_stride: tl.tensor,
    rows_stride: tl.tensor,
    head_rows: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    half = HEAD_DIM // 2
    inside = (dim < half)[None, :]
    real = (head < heads + 2 * kv_heads)[:, None] & inside
    turned = (head < heads + kv_heads)[:, None]
    at = qkv + token * token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + token * angle_stride + dim, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_stride + dim, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    new_first = narrow(tl.where(turned, first * c - second * s, first), qkv)
    new_second = narrow(tl.where(turned, second * c + first * s, second), qkv)
    tl.store(at, new_first, mask=real & turned)
    tl.store(at + half, new_second, mask=real & turned)
    # Layer 0's row of the first head's key says where all else lies; a negative one, that the token is padding.
    row = tl.load(rows + token * rows_stride)
    is_value = head >= heads + kv_heads
    kv_head = head - heads - tl.where(is_value, kv_heads, 0)
    to_row = row + kv_head.to(tl.int64) * head_rows + tl.where(is_value, BLOCK_TOKENS, 0)
    to = pool + to_row[:, None] * HEAD_DIM + dim[None, :]
    stored_heads = tl.where(row >= 0, 2 * kv_heads, 0)
    stored = inside & ((head >= heads) & (head < heads + stored_heads))[:, None]
    tl.store(to, new_first, mask=stored)
    tl.store(to + half, new_second, mask=stored)


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, pool: Tensor, layer: int) -> None:
    """As its twin; but of `rows` only the first column is read, and a token whose row is negative is not stored."""
    tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    chunk = power_of_two(min(all_heads, 16))
    launch(
        _rope_and_store,
        (tokens, triton.cdiv(all_heads, chunk)),
        qkv,
        cos,
        sin,
        rows,
        pool[:, :, layer],
        qkv.stride(0),
        cos.stride(0),
        rows.stride(0),
        layers * 2 * block_tokens,
        all_heads - 2 * kv_heads,
        kv_heads,
        BLOCK_TOKENS=block_tokens,
        HEAD_DIM=head_dim,
        HALF=power_of_two(head_dim // 2),
        HEADS=chunk,
        OVERLAP=overlaps(qkv),
        launch_pdl=overlaps(qkv),
        num_warps=4,
    )


@triton.jit
def _copy_blocks(
    pool: tl.tensor, sources: tl.tensor, targets: tl.tensor, words: tl.tensor, WORDS: tl.constexpr
) -> None:
    pair = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = tl.load(sources + pair).to(tl.int64)
    target = tl.load(targets + pair).to(tl.int64)
    real = word < tl.where(source >= 0, words, 0)
    tl.store(pool + target * words + word, tl.load(pool + source * words + word, mask=real), mask=real)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As its twin."""
    by_word = pool.view(torch.int32)
    words = by_word[0].numel()
    chunk = min(_COPY_BYTES // 4, power_of_two(words))
    launch(
        _copy_blocks,
        (sources.shape[0], triton.cdiv(words, chunk)),
        by_word,
        sources,
        targets,
        words,
        WORDS=chunk,
        num_warps=8,
    )
