"""Copies of whole blocks between two pools that lie at addresses of their own."""

from __future__ import annotations

import ctypes

from torch import Tensor

VECTOR_BYTES = 16
"""What both pools and their blocks are aligned to: the widest that a GPU's thread loads and stores at once."""


def scatter_blocks(pairs: Tensor, source: int, target: int, block_bytes: int, programs: int = 32) -> None:
    """Copies block `pairs[i, 0]` of the pool at address `source` to block `pairs[i, 1]` of the pool at `target`.

    `pairs` int32 [pairs, 2], no target twice. It takes no more of a GPU than `programs` programs do, which matters to
    whoever computes beside it, and nothing to the result.
    """
    check_alignment(source, target, block_bytes)
    for from_block, to_block in pairs.tolist():
        ctypes.memmove(target + to_block * block_bytes, source + from_block * block_bytes, block_bytes)


def check_alignment(*numbers: int) -> None:
    """Raises `ValueError` for the first address or size that is no multiple of `VECTOR_BYTES`."""
    for number in numbers:
        if number % VECTOR_BYTES:
            raise ValueError(f"{number} is no multiple of {VECTOR_BYTES} bytes")
