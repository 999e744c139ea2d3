"""The seam between an architecture and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.batch import Batch
from paceline.engine.weights import Weights


class Model(Protocol):
    """A decoder-only transformer over the paged pool; single-threaded, without a state of its own."""

    config: ModelConfig
    weights: Weights

    def forward(self, batch: Batch, pool: Tensor, tick: Callable[[], None]) -> Tensor:
        """Computes the batch, storing its KV, and returns logits [samples, vocab], float32.

        `pool` is `[num_blocks, kv_heads, layers of a group, 2, block_tokens, head_dim]`; `batch` has a plan for each
        KV group. `tick` is called before each layer.
        """
