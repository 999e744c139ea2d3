"""What a step reads, laid out on the device from a few numbers a request: so one small upload starts a whole step."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch

_TOKENS = 128  # of a program
_ENTRIES = 256  # of a block table, copied together


@triton.jit
def _expand_tokens(
    owners: tl.tensor,
    given: tl.tensor,
    query_starts: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    latest: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    table_stride: tl.tensor,
    block_rows: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    owner = tl.load(owners + token, mask=inside, other=-1)
    real = owner >= 0
    slot = tl.load(slots + owner, mask=real, other=0).to(tl.int64)
    start = tl.load(starts + owner, mask=real, other=0)
    first = tl.load(query_starts + owner, mask=real, other=0)
    position = tl.where(real, start + token - first, 0)
    known = tl.load(given + token, mask=real, other=0)
    pending = tl.load(latest + slot, mask=real & (known < 0), other=0)
    tl.store(token_ids + token, tl.where(known < 0, pending, known.to(tl.int64)), mask=inside)
    tl.store(positions + token, position.to(tl.int64), mask=inside)
    block = tl.load(tables + slot * table_stride + position // BLOCK_TOKENS, mask=real, other=0).to(tl.int64)
    row = block * block_rows + position % BLOCK_TOKENS
    tl.store(rows + token, tl.where(real, row, -1), mask=inside)


def expand_tokens(
    owners: Tensor,
    given: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    slots: Tensor,
    tables: Tensor,
    latest: Tensor,
    pool: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
) -> None:
    """As its twin."""
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    tokens = owners.shape[0]
    launch(
        _expand_tokens,
        (triton.cdiv(tokens, _TOKENS),),
        owners,
        given,
        query_starts,
        starts,
        slots,
        tables,
        latest,
        token_ids,
        positions,
        rows,
        tokens,
        tables.stride(0),
        kv_heads * layers * 2 * block_tokens,
        BLOCK_TOKENS=block_tokens,
        TOKENS=_TOKENS,
        num_warps=4,
    )


@triton.jit
def _expand_requests(
    query_starts: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    sample_rows: tl.tensor,
    step_tables: tl.tensor,
    table_stride: tl.tensor,
    step_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    first = tl.load(query_starts + request)
    end = tl.load(query_starts + request + 1)
    context = tl.where(end > first, tl.load(starts + request) + end - first, 0)
    tl.store(contexts + request, context)
    tl.store(sample_rows + request, tl.maximum(end - 1, 0).to(tl.int64))
    source = tables + tl.load(slots + request).to(tl.int64) * table_stride
    target = step_tables + request.to(tl.int64) * step_stride
    blocks = tl.cdiv(context, BLOCK_TOKENS)
    lane = tl.arange(0, ENTRIES)
    for entry in range(0, blocks, ENTRIES):
        reached = entry + lane < blocks
        tl.store(target + entry + lane, tl.load(source + entry + lane, mask=reached, other=0), mask=reached)


def expand_requests(
    query_starts: Tensor,
    starts: Tensor,
    slots: Tensor,
    tables: Tensor,
    block_tokens: int,
    contexts: Tensor,
    sample_rows: Tensor,
    step_tables: Tensor,
) -> None:
    """As its twin."""
    launch(
        _expand_requests,
        (contexts.shape[0],),
        query_starts,
        starts,
        slots,
        tables,
        contexts,
        sample_rows,
        step_tables,
        tables.stride(0),
        step_tables.stride(0),
        BLOCK_TOKENS=block_tokens,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )
