"""Llama, and by its options Mistral (windows), Qwen2 (biases) and Qwen3 (QK-norm): fused weights, paged KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from paceline import kernels
from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.batch import Batch
from paceline.engine.scoring import head_logits
from paceline.engine.weights import LayerWeights, Weights


class Llama:
    """A decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._places = KvGroups.of(config).places
        self._cos, self._sin = kernels.rope_tables(
            config.head_dim, config.context_tokens, config.rope_theta, weights.embed.device, config.rope_factors
        )

    def forward(self, batch: Batch, pool: Tensor, tick: Callable[[], None]) -> Tensor:
        """As `Model.forward`."""
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
            hidden = kernels.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._mlp(hidden, layer)
        hidden = kernels.add_rms_norm(hidden, residual, self.weights.final_norm, eps)
        return head_logits(hidden, self.weights.lm_head, batch.num_samples, batch.scoring)

    def _attention(
        self, hidden: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, batch: Batch, pool: Tensor, index: int
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        config = self.config
        qkv = kernels.linear(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            kernels.qk_norm(qkv, config.num_kv_heads, layer.q_norm, layer.k_norm, config.norm_eps)
        group, row = self._places[index]
        kernels.rope_and_store(qkv, cos, sin, batch.store_rows[group], pool, row)
        found = kernels.attention(qkv, pool, row, batch.attention[group], config.attention_scale)
        return kernels.linear(found, layer.o)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return kernels.linear(kernels.swiglu(kernels.linear(hidden, layer.gate_up)), layer.down)
