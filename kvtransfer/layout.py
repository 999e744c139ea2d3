"""What a KV block holds, byte for byte, and the fingerprint that tells two workers whether their blocks agree.

A pool is one allocation `[num_blocks, kv_heads, layers, 2, BLOCK_TOKENS, head_dim]`, keys at index 0 of the fourth
axis and values at index 1. The layers are those of one KV group: all groups have as many, and take blocks from the one
pool. Block-major, so that a block is one contiguous piece on the wire, and so is each head's
part of it: tiers of different tensor-parallel size exchange whole heads. docs/kv-layout.md has the measurements
behind it.
"""

from __future__ import annotations

import msgspec

from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.errors import FingerprintMismatch, quote
from paceline.types import BLOCK_TOKENS

FORMAT_VERSION = 1
"""Grows when the meaning of a block's bytes changes, or of the notification that announces them."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one stored number, by dtype name."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's blocks hold: for one of a model's KV groups, whichever takes the block, 16 tokens."""

    layers: int  # of a group
    kv_heads: int  # of this rank
    head_dim: int
    dtype: str  # a key of ITEM_BYTES
    windows: tuple[int | None, ...] = (None,)  # of each group, tokens that its layers attend to; None: all
    scale_bytes: int = 0  # bytes of quantisation scales for one head of one block, behind the head's numbers

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {quote(self.dtype)} is none of {', '.join(ITEM_BYTES)}")
        if min(self.layers, self.kv_heads, self.head_dim, len(self.windows)) < 1 or self.scale_bytes < 0:
            raise ValueError(f"a KV layout needs positive sizes: {self}")

    @classmethod
    def of(cls, config: ModelConfig, *, dtype: str, ranks: int = 1) -> KvLayout:
        """The layout of one rank of `ranks` of a model, stored as `dtype`."""
        if config.num_kv_heads % ranks:
            raise ValueError(f"{config.num_kv_heads} KV heads do not split over {ranks} ranks")
        groups = KvGroups.of(config)
        heads = config.num_kv_heads // ranks
        return cls(layers=groups.layers, kv_heads=heads, head_dim=config.head_dim, dtype=dtype, windows=groups.windows)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's part of a block: contiguous, over all its layers, keys and values."""
        return self.layers * 2 * BLOCK_TOKENS * self.head_dim * ITEM_BYTES[self.dtype] + self.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, and the distance between two neighbours in the pool."""
        return self.kv_heads * self.head_bytes

    def geometry(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """The pool's shape `[num_blocks, kv_heads, layers, 2, BLOCK_TOKENS, head_dim]`, where there are no scales."""
        return (num_blocks, self.kv_heads, self.layers, 2, BLOCK_TOKENS, self.head_dim)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for two workers' blocks to mean the same. Plain data: msgspec encodes it as it is."""

    format_version: int
    model: str
    weights_digest: str
    dtype: str
    layers: int  # of a block
    kv_heads: int  # of one rank
    head_dim: int
    block_tokens: int
    windows: tuple[int | None, ...] = (None,)  # of each KV group, in tokens

    @classmethod
    def of(cls, layout: KvLayout, *, model: str, weights_digest: str) -> Fingerprint:
        """The fingerprint of a pool, filled from these weights."""
        return cls(
            format_version=FORMAT_VERSION,
            model=model,
            weights_digest=weights_digest,
            dtype=layout.dtype,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=BLOCK_TOKENS,
            windows=layout.windows,
        )

    def check(self, other: Fingerprint) -> None:
        """Raises `FingerprintMismatch` naming the first field in which `other` differs, with both values."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise FingerprintMismatch(f"{field} differs: {quote(ours)} here, {quote(theirs)} at the peer")
