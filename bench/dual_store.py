"""The kernel that turns a layer's queries and keys and stores its KV, with a second pool to store it in: a peer's.

For `bench/dual_write.py`, which measures whether it is worth having. The peer's pool has the layout of ours and lies at
an address that is mapped here; a second row number a token says where in it the token belongs, as a second block table
would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline import kernels
from paceline.kernels.launch import launch, narrow, overlaps, power_of_two, start_next, wait_for_last


@dataclass(frozen=True, slots=True)
class PeerPool:
    """Where a step's tokens belong in a peer's pool."""

    address: int = field(repr=False)  # of the pool, as it is mapped here
    rows: Tensor  # int64 [tokens, 1], as the first column of `kernels.store_rows` gives them; negative: nowhere

    @classmethod
    def of(cls, address: int, blocks: Sequence[int], tokens: int, pool: Tensor) -> "PeerPool":
        """The first `tokens` tokens of a request with the table `blocks` there; `pool` is ours, laid out alike."""
        position = torch.arange(tokens, device=pool.device)
        block_tokens = pool.shape[-2]
        table = torch.tensor(list(blocks), device=pool.device)
        slots = table[position // block_tokens] * block_tokens + position % block_tokens
        return cls(address, kernels.store_rows(slots, pool)[:, :1].contiguous())


@triton.jit
def _rope_and_store_twice(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rows: tl.tensor,
    pool: tl.tensor,
    peer_rows: tl.tensor,
    peer: tl.tensor,
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
    row = tl.load(rows + token * rows_stride)
    peer_row = tl.load(peer_rows + token)
    is_value = head >= heads + kv_heads
    kv_head = head - heads - tl.where(is_value, kv_heads, 0)
    within = kv_head.to(tl.int64) * head_rows + tl.where(is_value, BLOCK_TOKENS, 0)
    stored_heads = tl.where(row >= 0, 2 * kv_heads, 0)
    # The peer first: its stores take the longest to be performed, and nothing here waits for them.
    sent_heads = tl.where(peer_row >= 0, stored_heads, 0)
    sent = inside & ((head >= heads) & (head < heads + sent_heads))[:, None]
    start = peer.to(tl.pointer_type(pool.dtype.element_ty))
    there = start + (peer_row + within)[:, None] * HEAD_DIM + dim[None, :]
    # An address is a plain number to the compiler: it is told that rows are whole vectors.
    there = tl.max_contiguous(tl.multiple_of(there, [1, 16]), [1, HALF])
    tl.store(there, new_first, mask=sent)
    tl.store(tl.max_contiguous(tl.multiple_of(there + half, [1, 16]), [1, HALF]), new_second, mask=sent)
    stored = inside & ((head >= heads) & (head < heads + stored_heads))[:, None]
    here = pool + (row + within)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(here, new_first, mask=stored)
    tl.store(here + half, new_second, mask=stored)
    tl.store(at, new_first, mask=real & turned)
    tl.store(at + half, new_second, mask=real & turned)


def rope_and_store_twice(
    qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, pool: Tensor, layer: int, peer: PeerPool
) -> None:
    """As `kernels.rope_and_store`, which also says what the arguments are, and into `peer` too.

    Half a row is a multiple of 16 bytes. A token that is padding is stored nowhere.
    """
    tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    row_bytes = head_dim * pool.element_size()
    if row_bytes % 32 or peer.address % 16:
        raise ValueError(f"half a row of {row_bytes} bytes, or the peer's address, is no multiple of 16 bytes")
    chunk = power_of_two(min(all_heads, 16))
    launch(
        _rope_and_store_twice,
        (tokens, triton.cdiv(all_heads, chunk)),
        qkv,
        cos,
        sin,
        rows,
        pool[:, :, layer],
        peer.rows,
        peer.address + layer * 2 * block_tokens * row_bytes,
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
