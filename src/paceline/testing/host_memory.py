"""Pools in host memory that processes of one user write into: what `CudaIpcTransport` runs on where there is no GPU.

`process_vm_writev` copies from this process into another's addresses, as a GPU's kernel stores into a mapped pool. A
copy starts when it is first asked whether it is done, so that, as on a GPU, it is under way for a while after its post.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field

import msgspec

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.pool_memory import Copy, CopyFailed, Mapping, Pairs

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class _Export(msgspec.Struct, frozen=True, array_like=True, tag="host-1"):
    process: int
    address: int


@dataclass(eq=False)
class _HostMapping:
    process: int
    address: int
    memory: HostMemory = field(repr=False)
    copies: int = 0  # under way

    def close(self) -> None:
        assert self.copies == 0, "a pool is unmapped under a copy"
        self.memory.mapped -= 1


class HostMemory:
    """One process's pool. A test may break the next copies, or hold all, through the fields."""

    def __init__(self) -> None:
        self.mapped = 0
        """Pools of others that are mapped now."""
        self.hold = False
        """While set, no copy moves or ends."""
        self.fail_next = 0
        """So many of the copies that move next fail."""
        self._region: Region | None = None

    def export(self, region: Region) -> bytes:
        """Host memory only."""
        if region.device != "cpu":
            raise StartupError("host memory: the pool is elsewhere")
        self._region = region
        return msgspec.msgpack.encode(_Export(os.getpid(), region.address))

    def map(self, exported: bytes, num_bytes: int) -> Mapping:
        """Notes where it is."""
        try:
            theirs = msgspec.msgpack.decode(exported, type=_Export)
        except msgspec.DecodeError as error:
            raise TransferFailed("the peer's metadata describes no host memory") from error
        self.mapped += 1
        return _HostMapping(theirs.process, theirs.address, self)

    def copy(self, target: Mapping, pairs: Pairs, *, in_stream: bool = False) -> Copy:
        """Notes what is to be copied. What a CPU was told to compute is there when the call returns."""
        assert self._region is not None and isinstance(target, _HostMapping)
        target.copies += 1
        return _HostCopy(self, self._region, target, pairs)

    def finish(self) -> None:
        """Copies that nobody asks about never move."""


@dataclass(eq=False)
class _HostCopy:
    memory: HostMemory
    source: Region
    target: _HostMapping
    pairs: Pairs
    started: bool = False
    over: bool = False
    seconds: float | None = None

    def done(self) -> bool:
        assert not self.over, "a copy that ended is asked again"
        if self.memory.hold:
            return False
        if not self.started:
            self.started = True
            return False
        self.over = True
        self.target.copies -= 1
        if self.memory.fail_next:
            self.memory.fail_next -= 1
            raise CopyFailed("as the test wants it")
        for source, target in self.pairs.tolist():
            self._write(self.source.address_of(source), self.target.address + target * self.source.block_bytes)
        return True

    def _write(self, source: int, target: int) -> None:
        num_bytes = self.source.block_bytes
        here, there = _Span(source, num_bytes), _Span(target, num_bytes)
        ours, theirs = ctypes.byref(here), ctypes.byref(there)
        written = _LIBC.process_vm_writev(self.target.process, ours, 1, theirs, 1, 0)
        if written != num_bytes:
            raise CopyFailed(f"{written} of {num_bytes} bytes written: {os.strerror(ctypes.get_errno())}")
