"""KV groups: the layers that share one block table of a request, and so one fate of their blocks.

Layers of one window let go of the same tokens at the same time, so a group's layers have one window. Every group has as
many layers, so that one pool of equal blocks serves all of them: a block holds 16 tokens for one group, and a request
has a table for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from paceline.checkpoint.model_config import ModelConfig
from paceline.types import BLOCK_TOKENS, blocks_for

_MOST_PADDING: Final = 1 / 8
"""Share of the pool's layers that may hold nothing. Large groups make large blocks, which travel faster, and few
tables, which each step has to prepare; where group sizes don't divide the layers of a window, the rest is lost."""


class KvGroups(msgspec.Struct, frozen=True):
    """How a model's layers are grouped. A model without windows has one group of all its layers."""

    layers: int  # of each group; the last of a window may use fewer
    windows: tuple[int | None, ...]  # of each group, tokens that its layers see; None, which comes first: all
    places: tuple[tuple[int, int], ...]  # of each of the model's layers: its group, and its index among the group's

    @classmethod
    def of(cls, config: ModelConfig) -> KvGroups:
        """The groups of a model: of each window, its layers in order, cut into groups of the largest fitting size."""
        kinds: dict[int | None, list[int]] = {}
        for layer in range(config.num_layers):
            kinds.setdefault(config.window_of(layer), []).append(layer)
        # What sees everything comes first: its blocks say how much of a prompt is cached.
        ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[1][0]))
        size = _group_size([len(layers) for layers in kinds.values()])
        windows: list[int | None] = []
        places: dict[int, tuple[int, int]] = {}
        for window, layers in ordered:
            for at in range(0, len(layers), size):
                places |= {layer: (len(windows), index) for index, layer in enumerate(layers[at : at + size])}
                windows.append(window)
        return cls(size, tuple(windows), tuple(places[layer] for layer in range(config.num_layers)))

    def __len__(self) -> int:
        """Groups, and so block tables of a request."""
        return len(self.windows)

    @property
    def windowed(self) -> bool:
        """True where some group lets go of blocks while a request runs."""
        return any(window is not None for window in self.windows)

    def first_read(self, num_tokens: int) -> list[int]:
        """Of each group the first block that is read when the token at position `num_tokens` is computed, or later."""
        return [0 if window is None else max(0, num_tokens + 1 - window) // BLOCK_TOKENS for window in self.windows]

    def most_blocks(self, chunk_tokens: int) -> tuple[int | None, ...]:
        """Of each group the most blocks that a request has at once in steps of `chunk_tokens`; None: one per 16 tokens.

        A step's tokens and their windows span `window - 1 + chunk_tokens` tokens, which may begin inside a block.
        """
        return tuple(None if window is None else blocks_for(window + chunk_tokens) + 1 for window in self.windows)

    def missing(self, num_tokens: int, held_blocks: int) -> list[range]:
        """Of each group the blocks, by their index in its table, that are to be sent to whoever goes on behind
        `num_tokens` tokens and has what the first `held_blocks` blocks' tokens need. Both ends derive the same.
        """
        end = blocks_for(num_tokens)
        return [range(min(end, max(held_blocks, first)), end) for first in self.first_read(num_tokens)]


def one_group(num_layers: int) -> KvGroups:
    """All layers in one group, without a window."""
    return KvGroups(num_layers, (None,), tuple((0, layer) for layer in range(num_layers)))


def _group_size(counts: Sequence[int]) -> int:
    """The most layers for a group that cost no more than `_MOST_PADDING`, `counts` being the layers of each window."""

    def padding(size: int) -> float:
        slots = sum(-(-count // size) * size for count in counts)
        return 1 - sum(counts) / slots

    return max(size for size in range(1, min(counts) + 1) if padding(size) <= _MOST_PADDING)
