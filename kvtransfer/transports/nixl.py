"""NIXL over UCX: RDMA or TCP across hosts, shared memory within one. What it does, found by trying it:
docs/kv-layout.md.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import DeviceKind, Region
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

PAD_BYTES = 64
"""A scratch line beside each pool for posts without pieces: NIXL tracks a write, and not a bare notification."""

MEMORY: dict[DeviceKind, str] = {"cpu": "DRAM", "cuda": "VRAM"}


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="nixl-1"):
    """What `register` returns, encoded. Grants writes: never printed."""

    agent: bytes
    address: int
    num_blocks: int
    block_bytes: int
    device: DeviceKind
    device_index: int
    pad_address: int

    def __repr__(self) -> str:
        return "_Metadata(...)"


@dataclass(slots=True)
class _Remote:
    """A peer's pool as connected. It outlives its release until the last handle to it is terminal."""

    region: Region
    pad_address: int = field(repr=False)
    outstanding: int = 0
    released: bool = False


@dataclass(slots=True)
class _Write:
    """A post under way. With `error` set it failed, and what is left is to be rid of the library's handle."""

    handle: Handle
    peer: Peer
    library_handle: Any
    done: bool = False
    error: str | None = None


def available() -> str | None:
    """None where NIXL with its UCX plugin can be used, else the reason why not."""
    try:
        importlib.import_module("nixl._api")
    except (ImportError, OSError) as error:
        return f"nixl cannot be imported: {error}"
    return None


class NixlTransport:
    """A `Transport` over one NIXL agent with the UCX backend, and without the progress thread that burns a core."""

    def __init__(self, name: str) -> None:
        """`name` becomes part of the agent's name; a random part keeps two lives apart. Raises `StartupError` without
        NIXL.
        """
        reason = available()
        if reason is not None:
            raise StartupError(f"transport nixl: {reason}; install paceline[worker]")
        api = importlib.import_module("nixl._api")
        logging.getLogger("nixl").setLevel(
            logging.WARNING
        )  # it prints to stdout from INFO on, whatever the program's logging
        self._errors: tuple[type[Exception], ...] = _error_types(api.nixlBind)
        self._name = f"{name}#{secrets.token_hex(4)}"
        self._pad = ctypes.create_string_buffer(PAD_BYTES)
        self._region: Region | None = None
        self._registered: list[Any] = []
        self._remotes: dict[Peer, _Remote] = {}
        self._writes: dict[Handle, _Write] = {}
        self._posted = 0
        self._closed = False
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(self._name, config)
        except self._errors as error:
            raise StartupError(f"transport nixl: the agent cannot start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise StartupError("transport nixl: its UCX plugin is missing")

    def __repr__(self) -> str:
        return f"NixlTransport({self._name!r}, peers={len(self._remotes)}, outstanding={len(self._writes)})"

    @property
    def wake_descriptor(self) -> int | None:
        """None: NIXL shows none of UCX's."""
        return None

    def register(self, region: Region) -> bytes:
        """Registers the pool and the pad; see `Transport.register`."""
        if self._region is not None:
            raise StartupError("transport nixl: one transport registers one region")
        pool = (region.address, region.num_bytes, region.device_index, "")
        pad = (ctypes.addressof(self._pad), PAD_BYTES, 0, "")
        try:
            self._registered.append(self._agent.register_memory([pool], MEMORY[region.device], backends=["UCX"]))
            self._registered.append(self._agent.register_memory([pad], "DRAM", backends=["UCX"]))
            metadata = self._agent.get_agent_metadata()
        except self._errors as error:
            raise StartupError(f"transport nixl: {region} cannot be registered: {error}") from error
        self._region = region
        return msgspec.msgpack.encode(
            _Metadata(
                agent=metadata,
                address=region.address,
                num_blocks=region.num_blocks,
                block_bytes=region.block_bytes,
                device=region.device,
                device_index=region.device_index,
                pad_address=ctypes.addressof(self._pad),
            )
        )

    def connect(self, metadata: bytes) -> Peer:
        """Loads a peer's metadata; see `Transport.connect`."""
        ours = self._own_region()
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
            region = Region(theirs.address, theirs.num_blocks, theirs.block_bytes, theirs.device, theirs.device_index)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed("the peer's metadata is not of this version of the nixl transport") from error
        check_block_bytes(ours, region)
        if region.device != ours.device:
            # UCX copies between a GPU and host memory at 0.5 GB/s, a hundredth of what a pinned copy does.
            raise TransferFailed(f"the peer's pool is on {region.device} and ours on {ours.device}")
        try:
            name = _text(self._agent.add_remote_agent(theirs.agent))
        except self._errors as error:
            raise TransferFailed(f"the peer's metadata was refused: {error}") from error
        peer = Peer(name, region.num_blocks)
        if peer in self._remotes:
            raise TransferFailed(f"{name} is connected already")
        self._remotes[peer] = _Remote(region, theirs.pad_address)
        return peer

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Starts a WRITE; see `Transport.post`. Over shared memory it returns when the data is there."""
        assert not in_stream, "NIXL knows nothing of streams"
        ours = self._own_region()
        remote = self._remotes.get(peer)
        if remote is None or remote.released:
            raise TransferFailed(f"{peer.name} is not connected, or released")
        check_pieces(ours, remote.region, pieces)
        if pieces:
            local = self._agent.get_xfer_descs(_descriptors(ours, pieces, source=True), MEMORY[ours.device])
            target = self._agent.get_xfer_descs(
                _descriptors(remote.region, pieces, source=False), MEMORY[remote.region.device]
            )
        elif notification is not None:
            local = self._agent.get_xfer_descs([(ctypes.addressof(self._pad), 1, 0)], "DRAM")
            target = self._agent.get_xfer_descs([(remote.pad_address, 1, 0)], "DRAM")
        else:
            raise ValueError("a post of nothing")
        try:
            library_handle = self._agent.initialize_xfer(
                "WRITE", local, target, peer.name, notification or b"", ["UCX"]
            )
        except self._errors as error:
            raise TransferFailed(f"a write to {peer.name} cannot start: {error}") from error
        self._posted += 1
        write = _Write(Handle(self._posted), peer, library_handle)
        self._writes[write.handle] = write
        remote.outstanding += 1
        try:
            write.done = self._agent.transfer(library_handle) == "DONE"
        except self._errors as error:
            # A part of it may be on its way: it is for `poll` to say when it is terminal.
            write.error = f"a write to {peer.name} failed when posted: {error}"
        return write.handle

    def poll(self) -> Polled:
        """Checks every handle, which is what sends their notifications, then takes what arrived; see
        `Transport.poll`.
        """
        finished = tuple(Finished(w.handle, w.error) for w in list(self._writes.values()) if self._ended(w))
        for each in finished:
            self._forget(self._writes.pop(each.handle))
        try:
            arrived: dict[str | bytes, list[bytes]] = self._agent.get_new_notifs(["UCX"])
        except self._errors as error:
            log.warning("notifications cannot be read", error=str(error))
            arrived = {}
        return Polled(
            finished,
            tuple(Notification(_text(sender), payload) for sender, payloads in arrived.items() for payload in payloads),
        )

    def release(self, peer: Peer) -> None:
        """Disconnects at once, or after the last outstanding handle; see `Transport.release`."""
        remote = self._remotes.get(peer)
        if remote is not None:
            remote.released = True
            self._disconnect_if_idle(peer, remote)

    def close(self) -> None:
        """Gives every library object back as far as it lets go; see `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        for write in self._writes.values():
            self._let_go(write)
        for peer in self._remotes:
            self._quietly(self._agent.remove_remote_agent, peer.name)
        for registered in self._registered:
            self._quietly(self._agent.deregister_memory, registered, ["UCX"])
        self._remotes.clear()
        self._agent = None

    def _own_region(self) -> Region:
        if self._closed or self._region is None:
            raise TransferFailed("the transport is closed, or has no region registered")
        return self._region

    def _ended(self, write: _Write) -> bool:
        """Polls one write; True when it is terminal."""
        if write.error is None and not write.done:
            try:
                state = self._agent.check_xfer_state(write.library_handle)
            except self._errors as error:
                write.error = f"a write to {write.peer.name} failed: {error}"
            else:
                write.done = state == "DONE"
                if state == "ERR":
                    write.error = f"a write to {write.peer.name} failed"
        return (write.done or write.error is not None) and self._let_go(write)

    def _let_go(self, write: _Write) -> bool:
        """Gives the library's handle back. It refuses while a part is under way: then the write is not terminal."""
        try:
            self._agent.release_xfer_handle(write.library_handle)
        except self._errors as error:
            log.debug("handle still active", peer=write.peer.name, error=str(error))
            return False
        return True

    def _forget(self, write: _Write) -> None:
        remote = self._remotes[write.peer]
        remote.outstanding -= 1
        self._disconnect_if_idle(write.peer, remote)

    def _disconnect_if_idle(self, peer: Peer, remote: _Remote) -> None:
        # Invalidating a peer under a live write would pull the connection from under it.
        if remote.released and remote.outstanding == 0:
            del self._remotes[peer]
            self._quietly(self._agent.remove_remote_agent, peer.name)

    def _quietly(self, call: Callable[..., object], *arguments: object) -> None:
        """For clean-up, where the library's complaint changes nothing."""
        try:
            call(*arguments)
        except self._errors as error:
            log.debug("clean-up refused", call=getattr(call, "__name__", ""), error=str(error))


def _text(name: str | bytes) -> str:
    """NIXL gives agent names as str or bytes, by call."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """Every exception type that the bindings define, and none of Python's own beyond RuntimeError."""
    named = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (*(kind for kind in named if isinstance(kind, type) and issubclass(kind, Exception)), RuntimeError)


def _descriptors(region: Region, pieces: Sequence[Piece], *, source: bool) -> npt.NDArray[np.uint64]:
    """Rows of (address, bytes, device index)."""  # [pieces, 3]
    rows = np.empty((len(pieces), 3), dtype=np.uint64)
    for row, piece in enumerate(pieces):
        first = piece.source_block if source else piece.target_block
        rows[row] = (region.address_of(first), piece.num_blocks * region.block_bytes, region.device_index)
    return rows
