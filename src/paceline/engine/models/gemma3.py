"""Gemma 3: layers that see a window and layers that see all, each kind with rotary positions of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import kernels
from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.batch import Batch
from paceline.engine.scoring import head_logits
from paceline.engine.weights import LayerWeights, Weights


class Gemma3:
    """A decoder-only transformer: scaled embedding, four norms a layer, QK-norm, GeGLU."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._places = KvGroups.of(config).places
        assert config.local_rope_theta is not None, "Gemma 3 has a rotary base for its layers with a window"
        device = weights.embed.device
        self._global = kernels.rope_tables(
            config.head_dim, config.context_tokens, config.rope_theta, device, config.rope_factors
        )
        self._local = kernels.rope_tables(config.head_dim, config.context_tokens, config.local_rope_theta, device)
        # Rounded to the model's dtype, as it was when the model was trained.
        self._embed_scale = torch.tensor(config.hidden_size**0.5, dtype=weights.embed.dtype, device=device)

    def forward(self, batch: Batch, pool: Tensor, tick: Callable[[], None]) -> Tensor:
        """As `Model.forward`."""
        eps = self.config.norm_eps
        to_local, to_global = ((cos[batch.positions], sin[batch.positions]) for cos, sin in (self._local, self._global))
        residual = F.embedding(batch.token_ids, self.weights.embed) * self._embed_scale
        hidden = kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for index, layer in enumerate(self.weights.layers):
            tick()
            assert layer.attention_out_norm is not None
            assert layer.mlp_out_norm is not None
            if index > 0:
                hidden = kernels.add_rms_norm(hidden, residual, layer.input_norm, eps)
            angles = to_local if self.config.is_local(index) else to_global
            hidden = self._attention(hidden, layer, angles, batch, pool, index)
            if index == self.config.num_layers - 1:  # All KV is stored: the rest is for the sampled rows alone.
                hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
            hidden = kernels.rms_norm(hidden, layer.attention_out_norm, eps)
            hidden = kernels.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = kernels.rms_norm(self._mlp(hidden, layer), layer.mlp_out_norm, eps)
        hidden = kernels.add_rms_norm(hidden, residual, self.weights.final_norm, eps)
        return head_logits(hidden, self.weights.lm_head, batch.num_samples, batch.scoring)

    def _attention(
        self,
        hidden: Tensor,
        layer: LayerWeights,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        pool: Tensor,
        index: int,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        config = self.config
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        qkv = kernels.linear(hidden, layer.qkv).view(hidden.shape[0], -1, config.head_dim)
        kernels.qk_norm(qkv, config.num_kv_heads, layer.q_norm, layer.k_norm, config.norm_eps)
        group, row = self._places[index]
        kernels.rope_and_store(qkv, *angles, batch.store_rows[group], pool, row)
        found = kernels.attention(qkv, pool, row, batch.attention[group], config.attention_scale)
        return kernels.linear(found, layer.o)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return kernels.linear(kernels.geglu(kernels.linear(hidden, layer.gate_up)), layer.down)
