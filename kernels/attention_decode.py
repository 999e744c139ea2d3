"""Attention of a few queries a request (a decode, or a verified draft) to a long context, which programs share.

Program (request, KV head, split) reads one piece of the context for all queries and heads that need it. Where there are
several pieces, each leaves its normalised sum and the logarithm of its weight, and a second kernel joins them, in the
order of the splits. A split's size hangs on its request's context and the number of splits alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention_tile import TileShape, decode_tile, fold_tile, load_queries
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
from paceline.kernels.paged_plan import SPLIT_TOKENS, PagedPlan


@triton.jit
def _decode(
    qkv: tl.tensor,
    keys_of_layer: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first_row = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_row
    context = tl.load(contexts + request)
    start = context - length
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(0, start + 1 - window) // BLOCK_TOKENS * BLOCK_TOKENS
    share = tl.cdiv(tl.maximum(SPLIT, tl.cdiv(context - lowest, SPLITS)), KEYS) * KEYS
    begin = lowest + split * share
    end = tl.minimum(begin + share, context)
    if OVERLAP:
        # What blocks held before this step is on its way while the kernel ends that writes the step's own tokens.
        key = tl.maximum(tl.minimum(begin + tl.arange(0, KEYS), end - 1), 0)
        block = tl.load(tables + request.to(tl.int64) * table_stride + key // BLOCK_TOKENS, mask=key < end, other=0)
        line = block.to(tl.int64) * block_stride + kv_head.to(tl.int64) * head_stride + key % BLOCK_TOKENS * HEAD_DIM
        place = tl.minimum(tl.arange(0, (DIM + 63) // 64) * 64, HEAD_DIM - 1)
        to_k = keys_of_layer + line[:, None] + place[None, :]
        fetch_ahead(to_k)
        fetch_ahead(to_k + BLOCK_TOKENS * HEAD_DIM)
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    if (length == 0) | (length > FEW):
        return

    row = tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = query < length
    dim = tl.arange(0, DIM)
    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    slot = ((request * FEW + query).to(tl.int64) * heads + head) * SPLITS + split
    if begin >= end:
        if SPLITS > 1:
            tl.store(weights + slot, tl.full([ROWS], float("-inf"), tl.float32), mask=real)
        return

    q = load_queries(qkv, row_stride, first_row, query, head, real, HEAD_DIM, DIM, UPCAST)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first_key in range(begin, end, KEYS):
        acc, most, total = fold_tile(
            q,
            acc,
            most,
            total,
            first_key,
            lowest,
            end,
            start + query,
            window,
            keys_of_layer + kv_head.to(tl.int64) * head_stride,
            tables + request.to(tl.int64) * table_stride,
            block_stride,
            scale,
            KEYS,
            BLOCK_TOKENS,
            HEAD_DIM,
            DIM,
            True,
            WINDOWED,
            UPCAST,
        )
    # A split may lie after a query, or before its window: then it adds nothing, and says so.
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if SPLITS == 1:
        to = out + (first_row + query).to(tl.int64)[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(to, narrow(acc, out), mask=inside)
    else:
        tl.store(parts + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        tl.store(weights + slot, tl.where(empty, float("-inf"), most + tl.log2(total)), mask=real)


@triton.jit
def _join(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    out_stride: tl.tensor,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_WIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    start_next(OVERLAP)
    wait_for_last(OVERLAP)
    head = tl.program_id(0)
    query = tl.program_id(1)
    request = tl.program_id(2)
    first_row = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_row
    if (query >= length) | (length > FEW):
        return
    split = tl.arange(0, SPLITS_WIDE)
    dim = tl.arange(0, DIM)
    slot = ((request * FEW + query).to(tl.int64) * tl.num_programs(0) + head) * SPLITS + split
    log_weight = tl.load(weights + slot, mask=split < SPLITS, other=float("-inf"))
    filled = log_weight > float("-inf")
    most = tl.max(log_weight, axis=0)
    weight = tl.where(filled, tl.exp2(log_weight - tl.where(most == float("-inf"), 0.0, most)), 0.0)
    # What an empty split left unwritten may be any number, NaN too.
    inside = filled[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(parts + slot[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, axis=0)
    joined = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    to = out + (first_row + query).to(tl.int64) * out_stride + head * HEAD_DIM + dim
    tl.store(to, narrow(joined, out), mask=dim < HEAD_DIM)


def decode_attention(
    qkv: Tensor,
    pool: Tensor,
    layer: int,
    plan: PagedPlan,
    scale: float,
    out: Tensor,
    shape: TileShape | None = None,
) -> None:
    """Attention of the requests with at most `plan.few` tokens, into their rows of `out` [tokens, heads * head_dim].

    `scale` is that of `paceline.kernels.attention`, times log2(e). A benchmark may give the `shape` itself.
    """
    requests = plan.contexts.shape[0]
    _, kv_heads, _, _, block_tokens, head_dim = pool.shape
    heads = qkv.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    shape = shape or decode_tile(power_of_two(plan.few * group, 16), pool, plan.splits)
    overlap = overlaps(qkv)
    dim = power_of_two(head_dim)
    split = plan.splits > 1
    parts = torch.empty(
        (requests * plan.few * heads * plan.splits if split else 1, head_dim), dtype=torch.float32, device=qkv.device
    )
    weights = torch.empty(parts.shape[0], dtype=torch.float32, device=qkv.device)
    launch(
        _decode,
        (plan.splits, kv_heads, requests),
        qkv,
        pool[:, :, layer, 0],
        out,
        parts,
        weights,
        plan.query_starts,
        plan.contexts,
        plan.tables,
        qkv.stride(0),
        out.stride(0),
        pool.stride(0),
        pool.stride(1),
        plan.tables.stride(0),
        plan.window or 0,
        scale,
        heads,
        GROUP=group,
        FEW=plan.few,
        SPLITS=plan.splits,
        SPLIT=SPLIT_TOKENS,
        ROWS=shape.rows,
        KEYS=shape.keys,
        BLOCK_TOKENS=block_tokens,
        HEAD_DIM=head_dim,
        DIM=dim,
        WINDOWED=plan.window is not None,
        UPCAST=upcast(pool),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if split:
        launch(
            _join,
            (heads, plan.few, requests),
            parts,
            weights,
            out,
            plan.query_starts,
            out.stride(0),
            FEW=plan.few,
            SPLITS=plan.splits,
            SPLITS_WIDE=power_of_two(plan.splits),
            HEAD_DIM=head_dim,
            DIM=dim,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=4 if plan.splits * dim > 2048 else 1,
        )
