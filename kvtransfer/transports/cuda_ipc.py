"""GPUs of one host: a writer maps its peer's pool once, and a kernel of its own writes the blocks there.

Nothing on the target moves a byte: the writer's kernel stores straight into the target's memory, over NVLink or PCIe,
and the notification follows through a Unix socket. Why not UCX, which does this too: it keeps a dead peer's pool mapped
until this process ends, so that a decode worker that is started again finds its GPU full. Here the socket breaks with
the peer, and the mapping is closed when the last copy into it is done.

**Why a notified target sees the data.** The writer's host sends the notification after it saw the event behind the
kernel as complete. At a kernel's end its stores are performed at the scope of the system: those to a peer's memory have
reached that device's L2, where its own accesses meet them, and the event is signalled behind them. The message orders
the target's host after the writer's, and a kernel launched after the message begins with empty L1 caches, so it reads
what L2 holds. A kernel that was running already may read anything: a target launches after the notification.

**What a dead writer can still write.** Nothing: its kernels end when the driver takes its context down, which is before
a parent can reap it, and there are no buffers between it and the pool.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.mailbox import MAX_PAYLOAD_BYTES, Address, Line, Mailbox, Sent
from paceline.kvtransfer.transports.pool_memory import Copy, CopyFailed, Mapping, Pairs, PoolMemory
from paceline.kvtransfer.transports.transport import (
    Finished,
    Handle,
    Notification,
    Peer,
    Piece,
    Polled,
    check_block_bytes,
    check_pieces,
)
from paceline.log import get_logger

log = get_logger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal for all processes on one running kernel, its containers included, and for no others."""


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="cuda_ipc-1"):
    """What `register` returns, encoded. Grants writes: never printed."""

    name: str
    host: str
    memory: bytes  # as `PoolMemory.export` gave it
    num_blocks: int
    block_bytes: int
    mailbox: str
    secret: bytes

    def __repr__(self) -> str:
        return "_Metadata(...)"


@dataclass(eq=False, slots=True)
class _Remote:
    """A peer's pool as mapped. It outlives its release, and its process, until the last copy into it is done."""

    region: Region
    line: Line
    mapping: Mapping | None  # None when it is closed
    outstanding: int = 0
    released: bool = False


@dataclass(eq=False, slots=True)
class _Write:
    """A post under way: first its copy, then its notification."""

    handle: Handle
    peer: Peer
    remote: _Remote
    copy: Copy | None  # None when it is over
    notification: bytes | None  # None when it is sent
    error: str | None = None
    seconds: float | None = None  # of the copy, once it is over
    over: bool = False


def available() -> str | None:
    """None where pools on GPUs can be exported and mapped, else the reason why not."""
    for module in ("torch", "triton"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{module} cannot be imported: {error}"
    reason: str | None = importlib.import_module("paceline.kvtransfer.transports.cuda_memory").unavailable()
    return reason


def cuda_memory() -> PoolMemory:
    """A GPU's memory; `StartupError` where there is none."""
    reason = available()
    if reason is not None:
        raise StartupError(f"transport cuda_ipc: {reason}")
    memory: PoolMemory = importlib.import_module("paceline.kvtransfer.transports.cuda_memory").CudaMemory()
    return memory


class CudaIpcTransport:
    """A `Transport` to GPUs of this host. The docstrings of `Transport` bind it."""

    def __init__(self, name: str, memory: PoolMemory | None = None) -> None:
        """`name` becomes part of the peer's name; a random part keeps two lives apart. `memory` is a GPU's, used as
        `CudaMemory` does unasked, unless it is given. Raises `StartupError` without a GPU.
        """
        self._memory = cuda_memory() if memory is None else memory
        self._name = f"{name}#{secrets.token_hex(4)}"
        try:
            self._host = BOOT_ID.read_text().strip()
        except OSError as error:
            raise StartupError(f"transport cuda_ipc: this host does not say which boot it is: {error}") from error
        self._mailbox = Mailbox()
        self._region: Region | None = None
        self._remotes: dict[Peer, _Remote] = {}
        self._leaving: list[_Remote] = []  # released, with writes under way
        self._writes: list[_Write] = []
        self._posted = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"CudaIpcTransport({self._name!r}, peers={len(self._remotes)}, outstanding={len(self._writes)})"

    @property
    def wake_descriptor(self) -> int | None:
        """See `Transport.wake_descriptor`."""
        return None if self._closed else self._mailbox.descriptor

    def register(self, region: Region) -> bytes:
        """Exports the pool; see `Transport.register`."""
        if self._region is not None:
            raise StartupError("transport cuda_ipc: one transport registers one region")
        exported = self._memory.export(region)
        self._region = region
        address = self._mailbox.address
        return msgspec.msgpack.encode(
            _Metadata(
                self._name, self._host, exported, region.num_blocks, region.block_bytes, address.name, address.secret
            )
        )

    def connect(self, metadata: bytes) -> Peer:
        """Maps the peer's pool; see `Transport.connect`. `TransferFailed` also where the peer is on another host, or
        on a device that this one does not reach.
        """
        ours = self._own_region()
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
            # The address is the mapping's secret: here only the number and the size of the blocks matter.
            region = Region(ours.address, theirs.num_blocks, theirs.block_bytes, ours.device, ours.device_index)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed("the peer's metadata is not of this version of the cuda_ipc transport") from error
        check_block_bytes(ours, region)
        if theirs.host != self._host:
            raise TransferFailed(f"{theirs.name} is on another host")
        peer = Peer(theirs.name, theirs.num_blocks, in_stream=True)
        if peer in self._remotes:
            raise TransferFailed(f"{theirs.name} is connected already")
        line = self._mailbox.call(Address(theirs.mailbox, theirs.secret), self._name)
        try:
            mapping = self._memory.map(theirs.memory, region.num_bytes)
        except TransferFailed:
            self._mailbox.hang_up(line)
            raise
        self._remotes[peer] = _Remote(region, line, mapping)
        return peer

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Launches the copy and returns; see `Transport.post`. Refuses notifications over `MAX_PAYLOAD_BYTES`.

        A notification that is behind no copy leaves at once.
        """
        ours = self._own_region()
        remote = self._remotes.get(peer)
        if remote is None:
            raise TransferFailed(f"{peer.name} is not connected, or released")
        if remote.line.lost or remote.mapping is None:
            raise TransferFailed(f"{peer.name} is lost")
        check_pieces(ours, remote.region, pieces)
        if not pieces and notification is None:
            raise ValueError("a post of nothing")
        if notification is not None and len(notification) > MAX_PAYLOAD_BYTES:
            raise TransferFailed(
                f"a notification of {len(notification)} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
            )
        try:
            copy = self._memory.copy(remote.mapping, block_pairs(pieces), in_stream=in_stream) if pieces else None
        except CopyFailed as error:
            raise TransferFailed(f"a write to {peer.name} cannot start: {error}") from error
        self._posted += 1
        handle = Handle(self._posted)
        write = _Write(handle, peer, remote, copy, notification)
        write.over = copy is None and self._ended(write)
        self._writes.append(write)
        remote.outstanding += 1
        return handle

    def poll(self) -> Polled:
        """Sends the notifications behind copies that are done, then takes what arrived; see `Transport.poll`."""
        if self._closed:
            return Polled()
        ended: list[_Write] = []
        under_way: list[_Write] = []
        for write in self._writes:
            (ended if write.over or self._ended(write) else under_way).append(write)
        self._writes = under_way
        for write in ended:
            write.remote.outstanding -= 1
        arrived = tuple(Notification(each.sender, each.payload) for each in self._mailbox.receive())
        self._unmap_what_is_over()
        return Polled(tuple(Finished(write.handle, write.error, write.seconds) for write in ended), arrived)

    def release(self, peer: Peer) -> None:
        """Unmaps the pool at once, or after the last outstanding handle; see `Transport.release`."""
        remote = self._remotes.pop(peer, None)
        if remote is not None:
            remote.released = True
            self._leaving.append(remote)
            self._unmap_what_is_over()

    def close(self) -> None:
        """Waits for copies under way, which takes milliseconds, and unmaps every pool; see `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            self._memory.finish()
        except RuntimeError as error:
            log.warning("copies cannot be waited for", error=str(error))
        for remote in [*self._remotes.values(), *self._leaving]:
            self._unmap(remote)
        self._remotes.clear()
        self._leaving.clear()
        self._writes.clear()
        self._mailbox.close()

    def _own_region(self) -> Region:
        if self._closed or self._region is None:
            raise TransferFailed("the transport is closed, or has no region registered")
        return self._region

    def _ended(self, write: _Write) -> bool:
        """Moves one write on; True when it is terminal."""
        if write.copy is not None:
            try:
                if not write.copy.done():
                    return False
            except CopyFailed as error:
                write.error = f"a write to {write.peer.name} failed: {error}"
            write.seconds, write.copy = write.copy.seconds, None
        if write.error is None and write.remote.line.lost:
            write.error = f"a write to {write.peer.name} failed: it is gone"
        if write.error is None and write.notification is not None:
            sent = write.remote.line.send(write.notification)
            if sent is Sent.FULL:
                return False
            if sent is Sent.LOST:
                write.error = f"a write to {write.peer.name} failed: it is gone"
        return True

    def _unmap_what_is_over(self) -> None:
        """Gives back the pools that nothing will be written to any more."""
        for peer, remote in self._remotes.items():
            if remote.line.lost and remote.mapping is not None and remote.outstanding == 0:
                log.info("peer lost, its pool is unmapped", peer=peer.name)
                self._unmap(remote)
        for remote in [each for each in self._leaving if each.outstanding == 0]:
            self._leaving.remove(remote)
            self._unmap(remote)

    def _unmap(self, remote: _Remote) -> None:
        self._mailbox.hang_up(remote.line)
        mapping, remote.mapping = remote.mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except RuntimeError as error:
                log.warning("a peer's pool cannot be unmapped", error=str(error))


def block_pairs(pieces: Sequence[Piece]) -> Pairs:
    """The pieces block by block: rows of (source block, target block)."""
    counts = np.array([piece.num_blocks for piece in pieces])
    firsts = np.array([(piece.source_block, piece.target_block) for piece in pieces])
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    pairs: Pairs = (np.repeat(firsts, counts, axis=0) + within[:, None]).astype(np.int32)
    return pairs


__all__ = ["CudaIpcTransport", "available", "block_pairs", "cuda_memory"]
