"""Attention of many queries a request (a chunk of a prompt): causal, over the paged pool, chunk after chunk.

Program (tile, KV head) takes the tile's queries with all heads of the KV head. Requests have tiles of their own; a
program finds its request by binary search, so that the grid hangs on the number of rows alone. The last tiles, which
see most, start first.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention_tile import fold_tile, load_queries, tile_shape
from paceline.kernels.launch import INTERPRETED, launch, narrow, power_of_two, upcast
from paceline.kernels.modes import batch_invariant
from paceline.kernels.paged_plan import PagedPlan


@triton.jit
def _prefill(
    qkv: tl.tensor,
    keys_of_layer: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    requests: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    INVARIANT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Request r's tiles begin at query_starts[r] // QUERIES + r, which leaves room for all of its predecessors'.
    request = 0
    after = requests
    while after - request > 1:
        middle = (request + after) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            request = middle
        else:
            after = middle
    first_row = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_row
    first_query = (tile - first_row // QUERIES - request) * QUERIES
    if (length <= FEW) | (first_query >= length):
        return
    start = tl.load(contexts + request) - length
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (query < length)
    position = start + query
    q = load_queries(qkv, row_stride, first_row, query, head, real, HEAD_DIM, DIM, UPCAST)
    keys_of_head = keys_of_layer + kv_head.to(tl.int64) * head_stride
    table = tables + tl.cast(request, tl.int64) * table_stride
    acc = tl.zeros([ROWS, DIM], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    end = start + tl.minimum(first_query + QUERIES, length)
    begin = 0
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(0, start + first_query + 1 - window) // BLOCK_TOKENS * BLOCK_TOKENS
        # Wherever a chunk begins, the same keys are folded in together.
        begin = lowest // KEYS * KEYS if INVARIANT else lowest
    elif not INVARIANT:
        # Keys before the first query are seen by all rows. Without a mask the compiler contracts other products and
        # sums, so that a row's last bits would hang on where its chunk begins.
        clear = (start + first_query + 1) // KEYS * KEYS
        for first_key in range(0, clear, KEYS):
            acc, most, total = fold_tile(
                q,
                acc,
                most,
                total,
                first_key,
                0,
                end,
                position,
                window,
                keys_of_head,
                table,
                block_stride,
                scale,
                KEYS,
                BLOCK_TOKENS,
                HEAD_DIM,
                DIM,
                False,
                False,
                UPCAST,
            )
        begin = clear
    for first_key in range(begin, end, KEYS):
        acc, most, total = fold_tile(
            q,
            acc,
            most,
            total,
            first_key,
            lowest,
            end,
            position,
            window,
            keys_of_head,
            table,
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
    dim = tl.arange(0, DIM)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + (first_row + query).to(tl.int64)[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, narrow(acc, out), mask=real[:, None] & (dim < HEAD_DIM)[None, :])


def prefill_attention(qkv: Tensor, pool: Tensor, layer: int, plan: PagedPlan, scale: float, out: Tensor) -> None:
    """Attention of the requests with more than `plan.few` tokens, into their rows of `out` [tokens, heads * head_dim].

    `scale` is that of `paceline.kernels.attention`, times log2(e).
    """
    tokens = qkv.shape[0]
    requests = plan.contexts.shape[0]
    _, kv_heads, _, _, block_tokens, head_dim = pool.shape
    group = (qkv.shape[1] - 2 * kv_heads) // kv_heads
    dim = power_of_two(head_dim)
    shape = tile_shape(32 if INTERPRETED else 64 if dim > 128 or pool.element_size() > 2 else 128, pool)
    queries = shape.rows // group
    launch(
        _prefill,
        (kv_heads, tokens // queries + requests),
        qkv,
        pool[:, :, layer, 0],
        out,
        plan.query_starts,
        plan.contexts,
        plan.tables,
        requests,
        qkv.stride(0),
        out.stride(0),
        pool.stride(0),
        pool.stride(1),
        plan.tables.stride(0),
        plan.window or 0,
        scale,
        GROUP=group,
        FEW=plan.few,
        QUERIES=queries,
        ROWS=shape.rows,
        KEYS=shape.keys,
        BLOCK_TOKENS=block_tokens,
        HEAD_DIM=head_dim,
        DIM=dim,
        WINDOWED=plan.window is not None,
        INVARIANT=batch_invariant(),
        UPCAST=upcast(pool),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
