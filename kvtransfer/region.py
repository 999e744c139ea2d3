"""A pool in memory, as a transport sees it: an address, a number of blocks and their size. No tensor, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous pool of `num_blocks` blocks of `block_bytes` bytes. Whoever makes it keeps the memory alive."""

    address: int = field(
        repr=False
    )  # `tensor.data_ptr()`; with the transport's metadata it grants writes, so it is never shown
    num_blocks: int
    block_bytes: int
    device: DeviceKind = "cpu"
    device_index: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or self.num_blocks < 1 or self.block_bytes < 1 or self.device_index < 0:
            raise ValueError(f"not a region of memory: {self}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_bytes

    def address_of(self, block: int) -> int:
        """Where block `block` begins."""
        return self.address + block * self.block_bytes

    def holds(self, first_block: int, num_blocks: int) -> bool:
        """True where the run of blocks lies wholly inside."""
        return first_block >= 0 and num_blocks > 0 and first_block + num_blocks <= self.num_blocks
