"""Llama: the whole architecture in one file, over fused weights and the paged KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from paceline import kernels
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.batch import Batch
from paceline.engine.weights import LayerWeights, Weights


class Llama:
    """A decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._cos, self._sin = kernels.rope_tables(
            config.head_dim, config.context_tokens, config.rope_theta, weights.embed.device
        )

    def forward(self, batch: Batch, pool: Tensor, tick: Callable[[], None]) -> Tensor:
        """Computes the batch, storing its KV, and returns logits [samples, vocab], float32.

        `pool` is `[num_blocks, kv_heads, layers, 2, block_tokens, head_dim]`. `tick` is called before each layer.
        """
        eps = self.config.norm_eps
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        residual = F.embedding(batch.token_ids, self.weights.embed)
        hidden = kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for index, layer in enumerate(self.weights.layers):
            tick()
            if index > 0:
                hidden = kernels.add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(hidden, layer, cos, sin, batch, pool, index)
            if index == self.config.num_layers - 1:  # All KV is stored: the rest is for the sampled rows alone.
                hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
            hidden = kernels.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._mlp(hidden, layer)
        hidden = kernels.add_rms_norm(hidden, residual, self.weights.final_norm, eps)
        return F.linear(hidden, self.weights.lm_head).float()

    def _attention(
        self, hidden: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, batch: Batch, pool: Tensor, index: int
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv = F.linear(hidden, layer.qkv).view(hidden.shape[0], -1, self.config.head_dim)
        kernels.rope_and_store(qkv, cos, sin, batch.store_rows, pool, index)
        return F.linear(kernels.attention(qkv, pool, index, batch.attention), layer.o)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return F.linear(kernels.swiglu(F.linear(hidden, layer.gate_up)), layer.down)
