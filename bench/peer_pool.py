"""A peer whose pool is mapped here, for benches that write to it: a process on the last GPU, or without one our own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor

from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.pool_memory import Mapping, PoolMemory
from paceline.testing.host_memory import HostMemory


class PeerProcess(Protocol):
    """Whoever owns the pool that is written to."""

    exported: bytes  # what `PoolMemory.map` takes

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Of what the blocks hold, as their owner reads them."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


def open_peer(shape: Sequence[int], device: torch.device) -> PeerProcess:
    """A peer with a bfloat16 pool of this shape on the last device of the kind of `device`."""
    return _OnGpu(shape) if device.type == "cuda" else _InHostMemory(shape)


def memory_of(device: torch.device) -> PoolMemory:
    """What the `cuda_ipc` transport copies with."""
    if device.type == "cpu":
        return HostMemory()
    from paceline.kvtransfer.transports.cuda_memory import CudaMemory  # it needs the driver's bindings

    return CudaMemory()


def region_of(pool: Tensor) -> Region:
    """A pool as transports see it."""
    block_bytes = pool[0].numel() * pool.element_size()
    if pool.is_cuda:
        return Region(pool.data_ptr(), pool.shape[0], block_bytes, "cuda", pool.device.index)
    return Region(pool.data_ptr(), pool.shape[0], block_bytes)


def address_of(mapping: Mapping) -> int:
    """Where a mapped pool lies in this process; one in host memory, where it lies in its owner's."""
    address: int = getattr(mapping, "address")  # noqa: B009 - both kinds have one, and transports need none
    return address


def checksums(pool: Tensor, blocks: Sequence[int]) -> list[int]:
    """The sum of each block's words."""
    words = pool.view(pool.shape[0], -1).view(torch.int64)
    sums: list[int] = []
    for first in range(0, len(blocks), 256):  # what is summed is copied before, and may be gigabytes
        sums += words[list(blocks[first : first + 256])].sum(1).tolist()
    return sums


class _InHostMemory:
    def __init__(self, shape: Sequence[int]) -> None:
        self._pool = torch.zeros(*shape, dtype=torch.bfloat16)
        self.exported = HostMemory().export(region_of(self._pool))

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return checksums(self._pool, blocks)

    def close(self) -> None:
        """The pool goes with it."""


class _OnGpu:
    """In a process of its own: CUDA maps no memory of a process into the same one."""

    def __init__(self, shape: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tuple(shape)), daemon=True)
        self._process.start()
        theirs.close()  # else nobody would ever hear of the process's death
        self.exported: bytes = self._pipe.recv()

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        self._pipe.send(list(blocks))
        found: list[int] = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self._process.kill()


def _serve(pipe: Connection, shape: tuple[int, ...]) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    pool = torch.zeros(*shape, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    memory = memory_of(device)
    pipe.send(memory.export(region_of(pool)))
    while (blocks := pipe.recv()) is not None:
        pipe.send(checksums(pool, blocks))
