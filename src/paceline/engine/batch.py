"""A step's chunks as flat tensors: all that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import kernels
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.scoring import Scoring
from paceline.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step; `tokens` is the number of all chunks' tokens, one chunk after the other."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], absolute, from 0
    store_rows: Sequence[Tensor]  # of each KV group [tokens, 2 * kv_heads], where its first layer keeps them
    attention: Sequence[kernels.AttentionPlan]  # of each KV group
    sample_rows: Tensor  # [samples + scored], tokens whose logits are wanted, those to sample from first
    num_samples: int
    scoring: Scoring
    opened_blocks: Tensor  # [blocks] that the step begins and doesn't fill


def build_batch(
    chunks: Sequence[Chunk],
    pool: Tensor,
    windows: Sequence[int | None] = (None,),
    latest: Mapping[EngineRequest, int] | None = None,
) -> Batch:
    """Flattens `chunks`, whose leases hold the blocks up to each chunk's end, for the pool of this shape and device.

    `windows` are those of the model's KV groups; `latest` has the tokens that requests do not know yet.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sample_rows: list[int] = []
    for chunk in chunks:
        token_ids += chunk.request.tokens[chunk.start : chunk.end]
        if len(token_ids) < len(positions) + chunk.num_tokens:
            assert latest is not None, f"{chunk.request.request_id} waits for its last token"
            token_ids.append(latest[chunk.request])
        positions += range(chunk.start, chunk.end)
        if chunk.samples:
            sample_rows.append(len(token_ids) - 1)
    num_samples = len(sample_rows)
    scoring = Scoring(chunks)
    starts, lengths = [chunk.start for chunk in chunks], [chunk.num_tokens for chunk in chunks]
    store_rows: list[Tensor] = []
    attention: list[kernels.AttentionPlan] = []
    opened: list[int] = []
    for group, window in enumerate(windows):
        tables = [chunk.request.lease.tables[group] for chunk in chunks]
        slots: list[int] = []
        for chunk, table in zip(chunks, tables, strict=True):
            slots += [table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(chunk.start, chunk.end)]
            last_block, filled = divmod(chunk.end, BLOCK_TOKENS)
            if filled and last_block * BLOCK_TOKENS >= chunk.start:
                opened.append(table[last_block])
        store_rows.append(kernels.store_rows(_ids(slots, pool), pool))
        attention.append(kernels.plan_attention(starts, lengths, tables, pool, window))
    return Batch(
        token_ids=_ids(token_ids, pool),
        positions=_ids(positions, pool),
        store_rows=store_rows,
        attention=attention,
        sample_rows=_ids(sample_rows + scoring.rows, pool),
        num_samples=num_samples,
        scoring=scoring,
        opened_blocks=_ids(opened, pool),
    )


def _ids(values: list[int], pool: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=pool.device)
