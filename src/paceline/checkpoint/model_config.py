"""The shape of a model, as the engine, the KV layout and the router's limits need it, from any kind of checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from paceline.errors import CheckpointError

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

_MOST_LAYERS: Final = 10_000
_MOST_HEAD_DIM: Final = 65_536
_POSITIVE: Final = (
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
    """A decoder-only transformer: rotary positions, grouped-query attention, gated MLPs, RMS norms.

    `architecture` says what is fixed by a name; what differs within an architecture has a field.
    """

    architecture: str  # one of ARCHITECTURES
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
    qkv_bias: bool = False
    qk_norm: bool = False  # each query's and key's head is normed before it is rotated
    attention_scale: float | None = None  # of the products of queries and keys; None: 1 / sqrt(head_dim)
    windows: tuple[int | None, ...] = ()  # tokens a layer's token sees, itself too; None: all; empty: no layer has one
    rope_factors: tuple[float, ...] = ()  # divisor of each of the head_dim / 2 frequencies; empty: none is scaled
    local_rope_theta: float | None = None  # of layers with a window where it differs; they are never scaled then

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token of this layer sees, itself among them; None: all."""
        return self.windows[layer] if self.windows else None

    def is_local(self, layer: int) -> bool:
        """Whether this layer has a window."""
        return self.window_of(layer) is not None

    def checked(self, origin: str) -> ModelConfig:
        """Itself, or `CheckpointError` naming the file `origin` and the value that makes no model."""
        for field in _POSITIVE:
            if getattr(self, field) <= 0:
                raise CheckpointError(f"{origin}: {field} is {getattr(self, field)}, expected more than 0")
        self._check_attention(origin)
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

    def _check_attention(self, origin: str) -> None:
        """The part of `checked` that concerns what few models have."""
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(f"{origin}: {self.architecture} is none of {', '.join(ARCHITECTURES)}")
        if self.windows and len(self.windows) != self.num_layers:
            raise CheckpointError(f"{origin}: {len(self.windows)} attention windows for {self.num_layers} layers")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise CheckpointError(
                f"{origin}: {len(self.rope_factors)} rotary factors for heads of {self.head_dim}, expected half as many"
            )
        limited = {window for window in self.windows if window is not None}
        for what, values in (
            ("an attention window", limited),
            ("a rotary factor", self.rope_factors),
            ("the local rotary base", () if self.local_rope_theta is None else (self.local_rope_theta,)),
            ("the attention scale", () if self.attention_scale is None else (self.attention_scale,)),
        ):
            for value in values:
                if not 0 < value < math.inf:  # also false for NaN
                    raise CheckpointError(f"{origin}: {what} is {value}, expected more than 0")


def check_bounded(origin: str, *, num_layers: int, head_dim: int) -> None:
    """Raises `CheckpointError` for sizes that only a damaged file has, before anything is made for each of them."""
    for what, value, most in (("num_layers", num_layers, _MOST_LAYERS), ("head_dim", head_dim, _MOST_HEAD_DIM)):
        if value > most:
            raise CheckpointError(f"{origin}: {what} is {value}, expected at most {most}")


def layer_windows(window: int | None, limited: Sequence[bool]) -> tuple[int | None, ...]:
    """`ModelConfig.windows` where the layers that `limited` marks share one."""
    if window is None or not any(limited):
        return ()
    return tuple(window if is_limited else None for is_limited in limited)
