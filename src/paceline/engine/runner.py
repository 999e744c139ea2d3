"""Runs a step on the device: owns the model and the pool's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline import kernels
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine import sampler
from paceline.engine.batch import build_batch
from paceline.engine.models import create
from paceline.engine.request import Chunk, Sampled
from paceline.engine.weights import Weights
from paceline.types import BLOCK_TOKENS


class Runner:
    """The model over one KV pool, which is allocated here once and never moves.

    `pool` is `[num_blocks, kv_heads, layers, 2, BLOCK_TOKENS, head_dim]`, contiguous, in the weights' dtype and on
    their device.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, num_blocks: int) -> None:
        self.model = create(config, weights)
        self._windows = {config.window_of(layer) for layer in range(config.num_layers)}
        self.pool = torch.zeros(
            (num_blocks, config.num_kv_heads, config.num_layers, 2, BLOCK_TOKENS, config.head_dim),
            dtype=weights.embed.dtype,
            device=weights.embed.device,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and heads: a contiguous piece of the pool."""
        return self.pool[0].numel() * self.pool.element_size()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> Sampled:
        """Computes the chunks, whose leases reach to their ends, and samples for those that complete their requests."""
        batch = build_batch(chunks, self.pool, self._windows)
        if batch.opened_blocks.numel():
            # A block that starts out partly filled is read whole, with the rest masked. Masking hides any number but
            # NaN, and the block's last owner may have left some: its failure must not become ours.
            self.pool.index_fill_(0, batch.opened_blocks, 0.0)
        logits = self.model.forward(batch, self.pool, tick)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        if any(request.fanout > 1 for request in requests):
            fanouts = torch.tensor([request.fanout for request in requests], device=logits.device)
            logits = logits.repeat_interleave(fanouts, dim=0)
        points = [point for request in requests for point in sampler.draw_points(request)]
        return replace(sampler.sample(logits, points), scores=tuple(batch.scoring.found()))

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copies a block, all layers and heads, within the pool."""
        device = self.pool.device
        kernels.copy_blocks(self.pool, torch.tensor([source], device=device), torch.tensor([target], device=device))
