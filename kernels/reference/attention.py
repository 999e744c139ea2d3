"""Attention over the paged pool in plain torch: requests in padded buckets, each one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WASTE_TOKENS = 512
"""Padded context tokens worth one more bucket: reading them costs about what a bucket's calls cost."""


@dataclass(frozen=True, slots=True)
class AttentionBucket:
    """Requests whose attention is computed as one call, padded to the longest of them."""

    rows: Tensor | None  # [requests, queries], tokens of the step, the last repeated as padding; None: all, in order
    real: Tensor | None  # [bucket's tokens], the entries of `rows` that are no padding
    queries: int
    context: int  # keys, the longest request's
    kv_rows: Tensor | None  # [2, requests, kv_heads, blocks] in layer 0, rows of block_tokens * head_dim; None: no past
    mask: (
        Tensor | None
    )  # [requests, 1, queries, context], 0 or -inf; None: just causal without a past, or hides nothing
    gathered: (
        Tensor | None
    )  # [2, requests, kv_heads, blocks, block_tokens * head_dim], room that all layers use in turn


AttentionPlan = list[AttentionBucket]


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    pool: Tensor,
    window: int | None = None,
) -> AttentionPlan:
    """How to compute a step's attention, once for all layers that share a window.

    Request i has `starts[i]` tokens stored before the step, `lengths[i]` tokens in it, after those of request i - 1,
    and its blocks in `tables[i]`. A token sees itself and the tokens before it, at most `window` in all; blocks that
    lie before every window are never read, so their entries in the table may hold anything.

    Requests are grouped by the power of two of their length, so that decodes are never padded to prompt chunks, and by
    context, so that little padding is read; prompts without a past need no pool at all.
    """
    if window is not None:
        starts, tables = _without_what_slid_out(starts, tables, window, pool.shape[-2])
    groups: dict[tuple[bool, int], list[int]] = {}
    for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        groups.setdefault((start == 0, (length - 1).bit_length()), []).append(request)
    first_rows = [0] * len(lengths)
    for request in range(1, len(lengths)):
        first_rows[request] = first_rows[request - 1] + lengths[request - 1]
    plan: AttentionPlan = []
    for (fresh, _), members in groups.items():
        for bucket in [members] if fresh else _split_by_context(members, starts, lengths):
            whole = len(bucket) == len(lengths) and len({lengths[request] for request in bucket}) == 1
            rows: tuple[Tensor | None, Tensor | None] = (None, None)
            if not whole:
                rows = _padded_rows(bucket, first_rows, lengths, pool.device)
            plan.append(_bucket(bucket, rows, starts, lengths, None if fresh else tables, pool, window))
    return plan


def _without_what_slid_out(
    starts: Sequence[int], tables: Sequence[Sequence[int]], window: int, block_tokens: int
) -> tuple[list[int], list[Sequence[int]]]:
    """Starts and tables counted from the first block that a window reaches: only distances matter to attention."""
    skipped = [max(0, start + 1 - window) // block_tokens for start in starts]
    return (
        [start - blocks * block_tokens for start, blocks in zip(starts, skipped, strict=True)],
        [table[blocks:] for table, blocks in zip(tables, skipped, strict=True)],
    )


def _split_by_context(members: list[int], starts: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Members in buckets, each in batch order, of which none pads contexts by more than WASTE_TOKENS in all."""
    buckets: list[list[int]] = []
    longest = wasted = 0
    for request in sorted(members, key=lambda member: -(starts[member] + lengths[member])):
        context = starts[request] + lengths[request]
        wasted += longest - context
        if not buckets or wasted > WASTE_TOKENS:
            buckets.append([])
            longest, wasted = context, 0
        buckets[-1].append(request)
    return [sorted(bucket) for bucket in buckets]


def _padded_rows(
    bucket: list[int], first_rows: list[int], lengths: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    queries = max(lengths[request] for request in bucket)
    first = torch.tensor([first_rows[request] for request in bucket], device=device)
    last = torch.tensor([lengths[request] - 1 for request in bucket], device=device)
    place = torch.arange(queries, device=device)
    rows = first[:, None] + torch.minimum(place, last[:, None])
    return rows, torch.nonzero((place <= last[:, None]).view(-1))[:, 0]


def _bucket(
    bucket: list[int],
    rows: tuple[Tensor | None, Tensor | None],
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]] | None,
    pool: Tensor,
    window: int | None,
) -> AttentionBucket:
    _, kv_heads, layers, _, block_tokens, head_dim = pool.shape
    queries = max(lengths[request] for request in bucket)
    context = max(starts[request] + lengths[request] for request in bucket)
    if tables is None:
        narrow = window is not None and window < context
        mask = _mask(bucket, starts, lengths, queries, context, pool, window) if narrow else None
        return AttentionBucket(*rows, queries, context, None, mask, None)
    num_blocks = -(-context // block_tokens)
    # A request with fewer blocks repeats its own first one: whatever is in there is its own, and masked.
    padded = [(list(tables[request][:num_blocks]), tables[request][0]) for request in bucket]
    table = torch.tensor([held + [pad] * (num_blocks - len(held)) for held, pad in padded], device=pool.device)
    head = torch.arange(kv_heads, device=pool.device)[:, None]
    part = torch.arange(2, device=pool.device)[:, None, None, None]
    kv_rows = (table[:, None, :] * kv_heads + head) * (layers * 2) + part
    gathered = pool.new_empty(*kv_rows.shape, block_tokens * head_dim)
    return AttentionBucket(
        *rows, queries, context, kv_rows, _mask(bucket, starts, lengths, queries, context, pool, window), gathered
    )


def _mask(
    bucket: list[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    queries: int,
    context: int,
    pool: Tensor,
    window: int | None,
) -> Tensor | None:
    """Hides from each query what comes after it, what its window has passed, and what pads a shorter context."""
    within = window is None or context <= window
    if within and queries == 1 and all(starts[request] + 1 == context for request in bucket):
        return None
    start = torch.tensor([starts[request] for request in bucket], device=pool.device)
    last_seen = start[:, None] + torch.arange(queries, device=pool.device)
    if len({lengths[request] for request in bucket}) > 1:
        end = torch.tensor([starts[request] + lengths[request] - 1 for request in bucket], device=pool.device)
        last_seen = torch.minimum(last_seen, end[:, None])
    position = torch.arange(context, device=pool.device)
    hidden = position > last_seen[:, None, :, None]
    if window is not None and not within:
        hidden |= position <= last_seen[:, None, :, None] - window
    return torch.zeros(hidden.shape, dtype=pool.dtype, device=pool.device).masked_fill_(hidden, -torch.inf)


def attention(qkv: Tensor, pool: Tensor, layer: int, plan: AttentionPlan, scale: float | None = None) -> Tensor:
    """Each token's attention to its request's tokens up to itself, the step's own already stored in the pool.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]. `scale` multiplies the products of
    queries and keys; by default 1 / sqrt(head_dim).
    """
    tokens, _, head_dim = qkv.shape
    heads = qkv.shape[1] - 2 * pool.shape[1]
    if len(plan) == 1 and plan[0].rows is None:
        bucket = plan[0]
        padded = qkv.view(-1, bucket.queries, qkv.shape[1], head_dim)
        return _attend(padded, pool, layer, bucket, scale).reshape(tokens, heads * head_dim)
    out = qkv.new_empty(tokens, heads * head_dim)
    for bucket in plan:
        assert bucket.rows is not None and bucket.real is not None
        found = _attend(qkv[bucket.rows], pool, layer, bucket, scale).reshape(-1, heads * head_dim)
        out[bucket.rows.view(-1)[bucket.real]] = found[bucket.real]
    return out


def _attend(qkv: Tensor, pool: Tensor, layer: int, bucket: AttentionBucket, scale: float | None) -> Tensor:
    """One bucket: [requests, queries, heads + 2 * kv_heads, head_dim] -> [requests, queries, heads, head_dim]."""
    _, kv_heads, _, _, block_tokens, head_dim = pool.shape
    requests, queries, all_heads, _ = qkv.shape
    heads = all_heads - 2 * kv_heads
    q = qkv[:, :, :heads].transpose(1, 2)
    if bucket.kv_rows is None or bucket.gathered is None:
        k, v = qkv[:, :, heads:].transpose(1, 2).chunk(2, dim=1)
        causal = bucket.mask is None
        found = F.scaled_dot_product_attention(q, k, v, bucket.mask, is_causal=causal, scale=scale, enable_gqa=True)
        return found.transpose(1, 2)
    by_block = pool.view(-1, block_tokens * head_dim)
    flat = bucket.gathered.view(-1, block_tokens * head_dim)
    torch.index_select(by_block, 0, (bucket.kv_rows + 2 * layer).view(-1), out=flat)
    k, v = bucket.gathered.view(2, requests, kv_heads, -1, head_dim)[:, :, :, : bucket.context].unbind(0)
    if queries > 1:
        return F.scaled_dot_product_attention(q, k, v, bucket.mask, scale=scale, enable_gqa=True).transpose(1, 2)
    # A single query: the heads that share a KV head are the rows of one product.
    grouped = q.reshape(requests, kv_heads, heads // kv_heads, head_dim)
    found = F.scaled_dot_product_attention(grouped, k, v, bucket.mask, scale=scale)
    return found.reshape(requests, 1, heads, head_dim)
