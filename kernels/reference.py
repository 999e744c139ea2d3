"""Every kernel's twin in plain torch: what a kernel must compute, and what runs where there is no GPU.

Shapes: `tokens` are the rows of a step, all requests flattened one after the other. The KV pool of a group is one
tensor `[num_blocks, kv_heads, layers, 2, block_tokens, head_dim]`, in which a block is one contiguous piece; keys are
at index 0 of the fourth dimension and values at 1. Seen as rows of `head_dim`, all of a layer's rows lie at a constant
distance from layer 0's, so that a step computes its row numbers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WASTE_TOKENS = 512
"""Padded context tokens worth one more bucket: reading them costs about what a bucket's calls cost."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean square in float32. `x` [..., hidden]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place and returns the sum's `rms_norm`. Both [tokens, hidden]."""
    return rms_norm(residual.add_(x), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves. [tokens, 2 * intermediate] -> [tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_tables(
    head_dim: int, context_tokens: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles, both [context_tokens, head_dim / 2], float32."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32, device=device), inverse)
    return angles.cos(), angles.sin()


def store_rows(slots: Tensor, pool: Tensor) -> Tensor:
    """Where layer 0 keeps the tokens: row numbers in the pool as rows of `head_dim`.

    `slots` [tokens] is block id * block_tokens + place in the block. -> [tokens, 2 * kv_heads]: keys' rows, then
    values'.
    """
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    head = torch.arange(kv_heads, device=slots.device).repeat(2)
    part = torch.arange(2, device=slots.device).repeat_interleave(kv_heads)
    block, place = (slots // block_tokens)[:, None], (slots % block_tokens)[:, None]
    return ((block * kv_heads + head) * layers * 2 + part) * block_tokens + place


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, pool: Tensor, layer: int) -> None:
    """Turns queries and keys in place (halves, as Hugging Face lays them out) and writes keys and values into the pool.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim]; `cos`, `sin` [tokens, head_dim / 2]; `rows` as `store_rows` gives
    them.
    """
    *_, block_tokens, head_dim = pool.shape
    num_stored = rows.shape[1]
    turned = qkv[:, : qkv.shape[1] - num_stored // 2]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    new_first = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(new_first)
    stored = qkv[:, qkv.shape[1] - num_stored :].reshape(-1, head_dim)
    pool.view(-1, head_dim).index_copy_(0, (rows + layer * 2 * block_tokens).view(-1), stored)


@dataclass(frozen=True, slots=True)
class AttentionBucket:
    """Requests whose attention is computed as one call, padded to the longest of them."""

    rows: Tensor | None  # [requests, queries], tokens of the step, the last repeated as padding; None: all, in order
    real: Tensor | None  # [bucket's tokens], the entries of `rows` that are no padding
    queries: int
    context: int  # keys, the longest request's
    kv_rows: Tensor | None  # [2, requests, kv_heads, blocks] in layer 0, rows of block_tokens * head_dim; None: no past
    mask: Tensor | None  # [requests, 1, queries, context], 0 or -inf; None: causal without a past, or nothing to hide
    gathered: (
        Tensor | None
    )  # [2, requests, kv_heads, blocks, block_tokens * head_dim], room that all layers use in turn


AttentionPlan = list[AttentionBucket]


def plan_attention(
    starts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]], pool: Tensor
) -> AttentionPlan:
    """How to compute a step's attention, once for all layers.

    Request i has `starts[i]` tokens stored before the step, `lengths[i]` tokens in it, after those of request i - 1,
    and its blocks in `tables[i]`. Requests are grouped by the power of two of their length, so that decodes are never
    padded to prompt chunks, and by context, so that little padding is read; prompts without a past need no pool at all.
    """
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
            plan.append(_bucket(bucket, rows, starts, lengths, None if fresh else tables, pool))
    return plan


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
) -> AttentionBucket:
    _, kv_heads, layers, _, block_tokens, head_dim = pool.shape
    queries = max(lengths[request] for request in bucket)
    context = max(starts[request] + lengths[request] for request in bucket)
    if tables is None:
        return AttentionBucket(*rows, queries, context, None, None, None)
    num_blocks = -(-context // block_tokens)
    # A request with fewer blocks repeats its own first one: whatever is in there is its own, and masked.
    padded = [(list(tables[request][:num_blocks]), tables[request][0]) for request in bucket]
    table = torch.tensor([held + [pad] * (num_blocks - len(held)) for held, pad in padded], device=pool.device)
    head = torch.arange(kv_heads, device=pool.device)[:, None]
    part = torch.arange(2, device=pool.device)[:, None, None, None]
    kv_rows = (table[:, None, :] * kv_heads + head) * (layers * 2) + part
    gathered = pool.new_empty(*kv_rows.shape, block_tokens * head_dim)
    return AttentionBucket(
        *rows, queries, context, kv_rows, _mask(bucket, starts, lengths, queries, context, pool), gathered
    )


def _mask(
    bucket: list[int], starts: Sequence[int], lengths: Sequence[int], queries: int, context: int, pool: Tensor
) -> Tensor | None:
    """Hides from each query what comes after it, and what pads a shorter context."""
    if queries == 1 and all(starts[request] + 1 == context for request in bucket):
        return None
    start = torch.tensor([starts[request] for request in bucket], device=pool.device)
    last_seen = start[:, None] + torch.arange(queries, device=pool.device)
    if len({lengths[request] for request in bucket}) > 1:
        end = torch.tensor([starts[request] + lengths[request] - 1 for request in bucket], device=pool.device)
        last_seen = torch.minimum(last_seen, end[:, None])
    hidden = torch.arange(context, device=pool.device) > last_seen[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=pool.dtype, device=pool.device).masked_fill_(hidden, -torch.inf)


def attention(qkv: Tensor, pool: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """Each token's attention to its request's tokens up to itself, the step's own already stored in the pool.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim].
    """
    tokens, _, head_dim = qkv.shape
    heads = qkv.shape[1] - 2 * pool.shape[1]
    if len(plan) == 1 and plan[0].rows is None:
        bucket = plan[0]
        padded = qkv.view(-1, bucket.queries, qkv.shape[1], head_dim)
        return _attend(padded, pool, layer, bucket).reshape(tokens, heads * head_dim)
    out = qkv.new_empty(tokens, heads * head_dim)
    for bucket in plan:
        assert bucket.rows is not None and bucket.real is not None
        found = _attend(qkv[bucket.rows], pool, layer, bucket).reshape(-1, heads * head_dim)
        out[bucket.rows.view(-1)[bucket.real]] = found[bucket.real]
    return out


def _attend(qkv: Tensor, pool: Tensor, layer: int, bucket: AttentionBucket) -> Tensor:
    """One bucket: [requests, queries, heads + 2 * kv_heads, head_dim] -> [requests, queries, heads, head_dim]."""
    _, kv_heads, _, _, block_tokens, head_dim = pool.shape
    requests, queries, all_heads, _ = qkv.shape
    heads = all_heads - 2 * kv_heads
    q = qkv[:, :, :heads].transpose(1, 2)
    if bucket.kv_rows is None or bucket.gathered is None:
        k, v = qkv[:, :, heads:].transpose(1, 2).chunk(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    by_block = pool.view(-1, block_tokens * head_dim)
    flat = bucket.gathered.view(-1, block_tokens * head_dim)
    torch.index_select(by_block, 0, (bucket.kv_rows + 2 * layer).view(-1), out=flat)
    k, v = bucket.gathered.view(2, requests, kv_heads, -1, head_dim)[:, :, :, : bucket.context].unbind(0)
    if queries > 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, enable_gqa=True).transpose(1, 2)
    # A single query: the heads that share a KV head are the rows of one product.
    grouped = q.reshape(requests, kv_heads, heads // kv_heads, head_dim)
    found = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask)
    return found.reshape(requests, 1, heads, head_dim)


GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: 2^64 / the golden ratio, made odd
NUCLEUS_WIDTH = 1024
"""Most likely tokens looked at first for a top-p cut; a flatter distribution is sorted whole."""


def mix64(z: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea, Flood, 2014; Stafford's variant 13), elementwise, int64, in place.

    With a state that grows by GOLDEN for each draw this is the whole generator, and any draw can be had without the
    others.
    """
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def sampling_keys(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """One generator a row from (seed, choice, absolute position), all int64 [rows]."""
    of_choice = mix64(mix64(seeds + GOLDEN) + choices * GOLDEN)
    return mix64(of_choice + positions * GOLDEN)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard exponential draws, float64, positive and finite: `keys` [rows, 1], `token_ids` [rows or 1, n] -> [rows,
    n].

    52 bits and a half: u lies in [2^-53, 1 - 2^-53], exactly representable, so E = -log1p(-u) is within [1.1e-16,
    36.8].
    """
    bits = (mix64(keys + (token_ids + 1) * GOLDEN) >> 12).bitwise_and_((1 << 52) - 1)
    u = bits.double().add_(0.5).mul_(2.0**-52)
    return u.neg_().log1p_().neg_()


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """One token a row: the winner of a race in which token t takes E[t] / p[t], among those that top_k and top_p keep.

    `logits` [rows, vocab]; `temperature` (> 0) and `top_p` float64, `top_k` (0: no limit) and `keys` int64, all [rows].
    A row's result depends on that row alone, whatever it is batched with.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(temperature[:, None])
    probabilities = scaled.softmax(-1)
    keys = keys[:, None]
    if not bool(((top_k > 0) | (top_p < 1.0)).any()):
        token_ids = torch.arange(logits.shape[1], device=logits.device)[None]
        return (exponential_noise(keys, token_ids) / probabilities).argmin(-1)
    kept = probabilities >= _least_kept(probabilities, top_k, top_p)[:, None]
    most = max(1, int(kept.sum(-1).amax()))
    token_ids = torch.where(kept, probabilities, -1.0).topk(most).indices.sort(-1).values
    race = (exponential_noise(keys, token_ids) / probabilities.gather(1, token_ids)).masked_fill_(
        ~kept.gather(1, token_ids), torch.inf
    )
    return token_ids.gather(1, race.argmin(-1, keepdim=True))[:, 0]


def _least_kept(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Each row's smallest probability that stays, [rows].

    Top-k first; then the fewest most likely tokens that make up top_p of what is left. Tokens as likely as the last
    one in stay in too, so that the cut is a value, and does not hang on how a sort orders equals.
    """
    vocab = probabilities.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    nucleus = top_p < 1.0
    limited = limit < vocab
    width = min(vocab, max(NUCLEUS_WIDTH, int(torch.where(limited, limit, 1).amax())))
    while True:
        ranked = probabilities.topk(width).values
        mass = ranked.cumsum(-1)
        last = (limit - 1).clamp(max=width - 1)[:, None]
        wanted = top_p * torch.where(limited, mass.gather(1, last)[:, 0], 1.0)
        inside = (mass < wanted[:, None]).sum(-1)  # the rank at which top_p is reached
        if width == vocab or not bool((nucleus & ~limited & (inside == width)).any()):
            break
        width = vocab
    least_k = torch.where(limited, ranked.gather(1, last)[:, 0], 0.0)
    least_p = torch.where(nucleus, ranked.gather(1, inside.clamp(max=width - 1)[:, None])[:, 0], 0.0)
    return torch.maximum(least_k, least_p)
