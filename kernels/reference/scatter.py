"""Copies of whole blocks between two pools that lie at addresses of their own."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

VECTOR_BYTES = 16
"""What both pools and their blocks are aligned to: the widest that a GPU's thread loads and stores at once."""


@dataclass(frozen=True, slots=True)
class ScatterCut:
    """How a copy is cut up among programs. The result is the same; how fast it is there, and beside what, is not."""

    programs: int = 32
    """On an H200 each takes one of 132 multiprocessors, and so many fill 90% of an NVLink."""
    chunk_bytes: int = 32768
    """What a program loads before it stores any: a power of two. A link of 400 GB/s with 1 us from load to store needs
    12 KiB in flight of each of 32 programs."""
    piece_bytes: int = 32768
    """Neighbouring bytes that one program copies, chunk by chunk, before it turns to others. With more, programs are in
    different blocks at the same time, and so do not all wait for one block's address to be translated."""
    warps: int = 16
    stages: int = 1
    """Chunks of a piece that a program has asked for at once; with more than one they pass through shared memory."""
    streaming: bool = False
    """Caches are told that nothing of it will be read again."""


def scatter_blocks(pairs: Tensor, source: int, target: int, block_bytes: int, cut: ScatterCut | None = None) -> None:
    """Copies block `pairs[i, 0]` of the pool at address `source` to block `pairs[i, 1]` of the pool at `target`.

    `pairs` int32 [pairs, 2], no target twice. It takes no more of a GPU than the `cut`'s programs do, which matters to
    whoever computes beside it.
    """
    check_alignment(source, target, block_bytes)
    for from_block, to_block in pairs.tolist():
        ctypes.memmove(target + to_block * block_bytes, source + from_block * block_bytes, block_bytes)


def check_alignment(*numbers: int) -> None:
    """Raises `ValueError` for the first address or size that is no multiple of `VECTOR_BYTES`."""
    for number in numbers:
        if number % VECTOR_BYTES:
            raise ValueError(f"{number} is no multiple of {VECTOR_BYTES} bytes")
