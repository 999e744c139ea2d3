"""Stations on GPUs: what they fill, compare and post stays there, so that pools may have gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import create
from paceline.testing.transport_end import Station

_MIX = -7046029254386353131  # odd, so that a block's words all differ
_SEED_STEP, _BLOCK_STEP = 1_000_003, 7_919


class CudaPool:
    """torch's memory, some way into an allocation of its caching allocator."""

    def __init__(self, num_blocks: int, block_bytes: int, index: int) -> None:
        device = torch.device("cuda", index)
        memory = torch.zeros(num_blocks + 1, block_bytes, dtype=torch.uint8, device=device)
        self.blocks = memory[1:]
        self.words = self.blocks.view(torch.int64)
        self.region = Region(self.blocks.data_ptr(), num_blocks, block_bytes, "cuda", index)

    def write(self, block: int, contents: bytes) -> None:
        """See `Pool`."""
        self.blocks[block].copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
        torch.cuda.synchronize(self.blocks.device)

    def read(self, block: int) -> bytes:
        """See `Pool`. The copy is launched now: after whatever notification the caller has seen."""
        return bytes(self.blocks[block].cpu().numpy().tobytes())


class CudaStation(Station):
    """A station with ways to work on whole pools."""

    def __init__(self, kind: str, name: str, num_blocks: int, block_bytes: int) -> None:
        """`kind` is one of `transport_end.GPU_KINDS`."""
        last = torch.cuda.device_count() - 1
        pool = CudaPool(num_blocks, block_bytes, last if name == "target" and kind != "cuda_ipc-one-gpu" else 0)
        super().__init__(pool, create("auto" if kind == "cuda-auto" else "cuda_ipc", name, device="cuda").transport)
        self._in_stream = kind == "cuda_ipc-in-stream"
        self._words = pool.words
        self._place = torch.arange(pool.words.shape[1], device=pool.words.device) * _MIX

    def dye(self, blocks: Sequence[int], seed: int) -> None:
        """Gives the blocks contents that are a function of the seed and the block. Returns when it is launched."""
        for block in blocks:
            self._words[block] = self._place + (seed * _SEED_STEP + block * _BLOCK_STEP)

    def not_dyed(self, blocks: Sequence[int], seed: int, as_blocks: Sequence[int]) -> list[int]:
        """Those of the blocks that do not hold, in every byte, what `dye` gave `as_blocks` at the same place."""
        return [
            block
            for block, origin in zip(blocks, as_blocks, strict=True)
            if not torch.equal(self._words[block], self._place + (seed * _SEED_STEP + origin * _BLOCK_STEP))
        ]

    def dye_and_post(
        self, blocks: Sequence[int], seed: int, peer: str, pieces: Sequence[tuple[int, int, int]], payload: bytes
    ) -> int:
        """Posts blocks that were just dyed, and in stream order even while they are."""
        self.dye(blocks, seed)
        if not self._in_stream:
            torch.cuda.synchronize(self._words.device)
        return self.post(peer, pieces, payload, in_stream=self._in_stream)

    def post_often(self, count: int, peer: str, pieces: Sequence[tuple[int, int, int]]) -> list[int]:
        """Posts the same so many times at once."""
        return [self.post(peer, pieces, b"again %d" % number) for number in range(count)]

    def checksums(self, blocks: Sequence[int]) -> dict[int, int]:
        """Sums of each block's words, read by a kernel that is launched now."""
        return dict(zip(blocks, self._words[list(blocks)].sum(1).tolist(), strict=True)) if blocks else {}
