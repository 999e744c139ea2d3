"""The shape of a model, as the engine, the KV layout and the router's limits need it, from any kind of checkpoint."""

from __future__ import annotations

import msgspec

from paceline.errors import CheckpointError

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_tokens",
    "norm_eps",
    "rope_theta",
)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer of the Llama family."""

    architecture: str  # "llama"
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    def checked(self, origin: str) -> ModelConfig:
        """Itself, or `CheckpointError` naming the file `origin` and the value that makes no model."""
        for field in _POSITIVE:
            if getattr(self, field) <= 0:
                raise CheckpointError(f"{origin}: {field} is {getattr(self, field)}, expected more than 0")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{origin}: {self.num_heads} attention heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"{origin}: head_dim is {self.head_dim}, and rotary embedding needs an even one")
        special = self.eos_token_ids if self.bos_token_id is None else (*self.eos_token_ids, self.bos_token_id)
        for token_id in special:
            if not 0 <= token_id < self.vocab_size:
                raise CheckpointError(
                    f"{origin}: the special token id {token_id} is not in the vocabulary, [0, {self.vocab_size})"
                )
        return self
