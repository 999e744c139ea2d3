"""Pools in GPUs' memory: exported and mapped by CUDA IPC, copied by one Triton kernel on a stream of their own.

CUDA IPC exports allocations, not addresses: a pool may begin inside a segment of torch's caching allocator, so what
travels is the handle of the whole allocation and the pool's distance from its start. A mapping works between processes
on one device or on two that reach each other, and the peer's device need not be visible here (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from paceline import kernels
from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import cuda_driver
from paceline.kvtransfer.transports.cuda_driver import DriverError, call, constant, current
from paceline.kvtransfer.transports.pool_memory import Copy, CopyFailed, Mapping, Pairs

_HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
_UUID_BYTES = 16
_LEAST_TABLE = 256  # pairs that the smallest table holds: prompts of 4,096 tokens


class _Export(msgspec.Struct, frozen=True, array_like=True, tag="cuda-1"):
    handle: bytes = b""
    offset: int = 0  # bytes from the allocation's start to the pool's
    allocation_bytes: int = 0
    device: bytes = b""  # its UUID

    def __repr__(self) -> str:
        return "_Export(...)"


@dataclass(eq=False, slots=True)
class _CudaMapping:
    address: int = field(repr=False)  # of the peer's pool, in this process
    _base: int = field(repr=False)
    _context: Any = field(repr=False)
    _open: bool = True

    def close(self) -> None:
        if self._open:
            self._open = False
            with current(self._context):
                call("cuIpcCloseMemHandle", self._base)


@dataclass(eq=False, slots=True)
class _Table:
    """Pairs on their way to the kernel: a pinned array that the host writes, and the device's copy that is read.

    A kernel that read host memory would wait a microsecond for each pair.
    """

    host: torch.Tensor  # int32 [capacity, 2]
    device: torch.Tensor
    began: Any  # torch.cuda.Event, which is untyped
    ended: Any


class CudaMemory:
    """The pool of this process on one device. One thread calls it."""

    def __init__(self, cut: kernels.ScatterCut | None = None) -> None:
        self.cut = cut or kernels.ScatterCut()
        """How the copies from now on are cut up."""
        self._region: Region | None = None
        self._tables: dict[int, list[_Table]] = {}  # free ones, by capacity

    def export(self, region: Region) -> bytes:
        """See `PoolMemory.export`. Compiles the kernel as well, so that no hand-off waits for that."""
        if region.device != "cuda":
            raise StartupError("transport cuda_ipc: it copies between GPUs, and the pool is in host memory")
        if region.address % 16 or region.block_bytes % 16:
            raise StartupError(
                f"transport cuda_ipc: the pool and its blocks of {region.block_bytes} bytes must be aligned to 16 bytes"
            )
        self._torch_device = torch.device("cuda", region.device_index)
        try:
            self._device = call("cuDeviceGet", region.device_index)
            self._context = call("cuDevicePrimaryCtxRetain", self._device)
            with current(self._context):
                exported = _export(region.address, self._device)
        except DriverError as error:
            raise StartupError(f"transport cuda_ipc: the pool cannot be exported: {error}") from error
        # Of high priority: a hand-off's last part is a few blocks that somebody waits for, beside a step that is not.
        # Two, for what is there already must not wait for what is being computed.
        self._stream: Any = torch.cuda.Stream(self._torch_device, priority=-1)  # type: ignore[no-untyped-call]
        self._behind: Any = torch.cuda.Stream(self._torch_device, priority=-1)  # type: ignore[no-untyped-call]
        self._region = region
        self._compile()
        return msgspec.msgpack.encode(exported)

    def map(self, exported: bytes, num_bytes: int) -> _CudaMapping:
        """See `PoolMemory.map`."""
        try:
            theirs = msgspec.msgpack.decode(exported, type=_Export)
        except msgspec.DecodeError as error:
            raise TransferFailed("the peer's metadata does not describe a pool on a GPU") from error
        fits = theirs.offset >= 0 and theirs.offset + num_bytes <= theirs.allocation_bytes
        if len(theirs.handle) != _HANDLE_BYTES or not fits or theirs.offset % 16:
            raise TransferFailed("the peer's metadata describes a pool that does not lie in its allocation")
        try:
            self._check_access(theirs.device)
            handle = cuda_driver.struct_from("CUipcMemHandle", theirs.handle)
            lazily = int(constant("CUipcMem_flags", "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS"))
            with current(self._context):
                base = int(call("cuIpcOpenMemHandle", handle, lazily))
        except DriverError as error:
            raise TransferFailed(f"the peer's pool cannot be mapped: {error}") from error
        return _CudaMapping(base + theirs.offset, base, self._context)

    def copy(self, target: Mapping, pairs: Pairs, *, in_stream: bool = False) -> Copy:
        """See `PoolMemory.copy`; what was launched is what torch's current stream holds."""
        assert self._region is not None and isinstance(target, _CudaMapping)
        table = self._table(len(pairs))
        table.host[: len(pairs)] = torch.from_numpy(pairs)
        launched, stream = torch.cuda.current_stream(self._torch_device), self._behind if in_stream else self._stream
        try:
            with torch.cuda.stream(stream):
                on_device = table.device[: len(pairs)]
                on_device.copy_(table.host[: len(pairs)], non_blocking=True)
                if in_stream:
                    stream.wait_stream(launched)
                table.began.record(stream)
                kernels.scatter_blocks(
                    on_device, self._region.address, target.address, self._region.block_bytes, self.cut
                )
                table.ended.record(stream)
        except RuntimeError as error:
            # What was launched may run; only its end, which nobody will be told of, makes the table free.
            raise CopyFailed(f"the copy cannot be launched: {_first_line(error)}") from error
        return _CudaCopy(table, self._tables[table.host.shape[0]])

    def finish(self) -> None:
        """See `PoolMemory.finish`."""
        if self._region is not None:
            self._stream.synchronize()
            self._behind.synchronize()

    def _compile(self) -> None:
        assert self._region is not None
        none = torch.empty(0, 2, dtype=torch.int32, device=self._torch_device)
        with torch.cuda.stream(self._stream):
            address, block_bytes = self._region.address, self._region.block_bytes
            kernels.scatter_blocks(none, address, address, block_bytes, self.cut)
        self._stream.synchronize()

    def _check_access(self, device: bytes) -> None:
        """Says by name that two devices which are both visible do not reach each other; CUDA's own word is vague."""
        for ordinal in range(int(call("cuDeviceGetCount"))):
            theirs = call("cuDeviceGet", ordinal)
            if _uuid(theirs) == device and int(theirs) != int(self._device):
                if not call("cuDeviceCanAccessPeer", self._device, theirs):
                    raise TransferFailed(f"{self._torch_device} cannot reach the memory of cuda:{ordinal}, the peer's")
                return

    def _table(self, pairs: int) -> _Table:
        """A free table for so many pairs. There are as many as copies were ever under way at once."""
        capacity = max(_LEAST_TABLE, 1 << (pairs - 1).bit_length())
        free = self._tables.setdefault(capacity, [])
        if free:
            return free.pop()
        with torch.cuda.stream(self._stream):  # else it might be memory that a kernel under way still writes to
            on_device = torch.empty(capacity, 2, dtype=torch.int32, device=self._torch_device)
            host = torch.empty(capacity, 2, dtype=torch.int32, pin_memory=True)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return _Table(host, on_device, began, ended)


@dataclass(eq=False, slots=True)
class _CudaCopy:
    _table: _Table
    _free: list[_Table]
    seconds: float | None = None

    def done(self) -> bool:
        try:
            if not self._table.ended.query():
                return False
            self.seconds = self._table.began.elapsed_time(self._table.ended) / 1e3
        except RuntimeError as error:  # the context is beyond use: every later call will say so too
            raise CopyFailed(f"the copy failed: {_first_line(error)}") from error
        self._free.append(self._table)
        return True


def unavailable() -> str | None:
    """None where pools can lie on a GPU and be exported, else the reason why not."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return cuda_driver.unavailable()


def _export(address: int, device: Any) -> _Export:
    capable = constant("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE")
    if not call("cuPointerGetAttribute", capable, address):
        raise StartupError(
            "transport cuda_ipc: the pool's memory is of a kind that CUDA IPC does not export, as torch's expandable "
            "segments are: take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF)"
        )
    base, allocation_bytes = call("cuMemGetAddressRange", address)
    handle = cuda_driver.bytes_of(call("cuIpcGetMemHandle", int(base)), _HANDLE_BYTES)
    return _Export(handle, address - int(base), int(allocation_bytes), _uuid(device))


@functools.lru_cache(maxsize=64)
def _uuid_of(ordinal: int) -> bytes:
    return cuda_driver.bytes_of(call("cuDeviceGetUuid", call("cuDeviceGet", ordinal)), _UUID_BYTES)


def _uuid(device: Any) -> bytes:
    return _uuid_of(int(device))


def _first_line(error: Exception) -> str:
    """CUDA errors of torch go on with advice on debugging, over several lines."""
    return str(error).partition("\n")[0]
