"""A step's chunks as flat tensors: all that the model reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    store_rows: Tensor  # [tokens, 2 * kv_heads], where layer 0 keeps them
    attention: Mapping[int | None, kernels.AttentionPlan]  # by the window of the layers that share it
    sample_rows: Tensor  # [samples + scored], tokens whose logits are wanted, those to sample from first
    num_samples: int
    scoring: Scoring
    opened_blocks: Tensor  # [blocks] that the step begins and doesn't fill


def build_batch(
    chunks: Sequence[Chunk],
    pool: Tensor,
    windows: Collection[int | None] = (None,),
    latest: Mapping[EngineRequest, int] | None = None,
) -> Batch:
    """Flattens `chunks`, whose leases hold the blocks up to each chunk's end, for the pool of this shape and device.

    `windows` are those that the model's layers have; `latest` has the tokens that requests do not know yet.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    opened: list[int] = []
    for chunk in chunks:
        blocks = chunk.request.lease.blocks
        token_ids += chunk.request.tokens[chunk.start : chunk.end]
        if len(token_ids) < len(positions) + chunk.num_tokens:
            assert latest is not None, f"{chunk.request.request_id} waits for its last token"
            token_ids.append(latest[chunk.request])
        positions += range(chunk.start, chunk.end)
        slots += [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(chunk.start, chunk.end)]
        if chunk.samples:
            sample_rows.append(len(token_ids) - 1)
        last_block, filled = divmod(chunk.end, BLOCK_TOKENS)
        if filled and last_block * BLOCK_TOKENS >= chunk.start:
            opened.append(blocks[last_block])
    num_samples = len(sample_rows)
    scoring = Scoring(chunks)
    return Batch(
        token_ids=_ids(token_ids, pool),
        positions=_ids(positions, pool),
        store_rows=kernels.store_rows(_ids(slots, pool), pool),
        attention={
            window: kernels.plan_attention(
                [chunk.start for chunk in chunks],
                [chunk.num_tokens for chunk in chunks],
                [chunk.request.lease.blocks for chunk in chunks],
                pool,
                window,
            )
            for window in windows
        },
        sample_rows=_ids(sample_rows + scoring.rows, pool),
        num_samples=num_samples,
        scoring=scoring,
        opened_blocks=_ids(opened, pool),
    )


def _ids(values: list[int], pool: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=pool.device)
