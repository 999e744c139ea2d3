"""Runs a step on the device: owns the model and the pool's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine import sampler
from paceline.engine.batch import Batch, build_batch
from paceline.engine.models import create
from paceline.engine.request import Chunk, EngineRequest, Sampled
from paceline.engine.weights import Weights
from paceline.types import BLOCK_TOKENS


class RunningStep(Protocol):
    """A step that the device computes."""

    @property
    def done(self) -> bool:
        """True when `result` would not wait."""

    def result(self) -> Sampled:
        """What it sampled; waits for the device where it is not done."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed as it was launched."""

    sampled: Sampled

    @property
    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> Sampled:
        """What it sampled."""
        return self.sampled


class StepRunner(Protocol):
    """What the engine needs of whatever computes its steps. Steps are computed in the order of their launches."""

    pool: Tensor
    depth: int
    """Steps that may be in flight when another is launched: 1 where a device computes beside the host, else 0."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, a KV group's layers and all heads: a contiguous piece of the pool."""

    def launch(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> RunningStep:
        """Starts the chunks, whose leases reach to their ends, and sampling for those that complete their requests.

        A chunk's last token may be one that a step in flight samples. `tick` is called between layers, where the step
        is computed at once.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Copies a block, its layers and all heads, within the pool, behind the steps in flight."""


class Runner:
    """Computes each step as it is launched, on the weights' device, over one KV pool.

    `pool` is `[num_blocks, kv_heads, layers of a KV group, 2, BLOCK_TOKENS, head_dim]`, contiguous, in the weights'
    dtype; it is allocated here once and never moves. A `depth` of 1 keeps results back by a step, as a GPU does: for
    tests.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, num_blocks: int, depth: int = 0) -> None:
        self.model = create(config, weights)
        self.depth = depth
        self.groups = KvGroups.of(config)
        self._known: dict[EngineRequest, int] = {}  # what the last step sampled: its request may not know it yet
        self.pool = torch.zeros(
            self.pool_shape(config, num_blocks), dtype=weights.embed.dtype, device=weights.embed.device
        )

    @staticmethod
    def pool_shape(config: ModelConfig, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[num_blocks, kv_heads, layers of a KV group, 2, BLOCK_TOKENS, head_dim]`."""
        return (num_blocks, config.num_kv_heads, KvGroups.of(config).layers, 2, BLOCK_TOKENS, config.head_dim)

    @property
    def block_bytes(self) -> int:
        """As `StepRunner.block_bytes`."""
        return self.pool[0].numel() * self.pool.element_size()

    def launch(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> RunningStep:
        """As `StepRunner.launch`."""
        return FinishedStep(self.run(chunks, tick))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> Sampled:
        """Computes the chunks, and samples for those that complete their requests."""
        batch = build_batch(chunks, self.pool, self.groups.windows, self._known)
        if batch.opened_blocks.numel():
            # A block that starts out partly filled is read whole, with the rest masked. Masking hides any number but
            # NaN, and the block's last owner may have left some: its failure must not become ours.
            self.pool.index_fill_(0, batch.opened_blocks, 0.0)
        sampled = self._sample(self.model.forward(batch, self.pool, tick), batch, chunks)
        if self.depth:
            entries = iter(sampled.token_ids)
            sampling = [chunk.request for chunk in chunks if chunk.samples]
            self._known = {request: [next(entries) for _ in range(request.fanout)][-1] for request in sampling}
        return sampled

    def _sample(self, logits: Tensor, batch: Batch, chunks: Sequence[Chunk]) -> Sampled:
        sampling = [chunk for chunk in chunks if chunk.samples]
        if any(chunk.request.fanout > 1 for chunk in sampling):
            fanouts = torch.tensor([chunk.request.fanout for chunk in sampling], device=logits.device)
            logits = logits.repeat_interleave(fanouts, dim=0)
        points = [point for chunk in sampling for point in sampler.draw_points(chunk)]
        return replace(sampler.sample(logits, points), scores=tuple(batch.scoring.found()))

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """As `StepRunner.copy_block`."""
        # Not by a kernel that takes ids: their upload would wait for the steps in flight.
        self.pool[target].copy_(self.pool[source])
