"""The in-memory twin: transports of one process that copy between real pools, under a hub that a test delays,
re-orders and breaks.

It keeps every rule of `Transport` and is stricter where the rules allow: nothing arrives before the sender polls.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
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


@dataclass(eq=False)
class Hub:
    """The network between loopback transports, and a test's hands on it. The fields may be set at any time."""

    hold: bool = False  # while set, nothing that was posted moves or ends
    delay_polls: int = 0  # the sender's polls that a post waits through before it moves
    newest_first: bool = False  # posts that are due in one poll move in reverse order
    in_stream: bool = False  # peers that are connected from now on take writes behind what was launched
    fail_next: int = 0  # so many of the posts that are due next end failed, their first half of pieces written
    live: dict[str, LoopbackTransport] = field(default_factory=dict, repr=False)

    def kill(self, transport: LoopbackTransport) -> None:
        """The transport's process dies: what it posted is never written, and posts to it end failed."""
        self.live.pop(transport.name, None)


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="loopback-1"):
    name: str


@dataclass(eq=False, slots=True)
class _Post:
    handle: Handle
    peer: Peer
    pieces: tuple[Piece, ...]
    notification: bytes | None
    due: int  # the poll of the sender in which it moves


class LoopbackTransport:
    """A `Transport` to others on the same hub. The docstrings of `Transport` bind it."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = f"{name}#{secrets.token_hex(4)}"
        self._hub = hub
        self._region: Region | None = None
        self._peers: dict[Peer, Region] = {}
        self._posts: list[_Post] = []
        self._inbox: list[Notification] = []
        self._posted = 0
        self._polls = 0

    @property
    def wake_descriptor(self) -> int | None:
        """None: nothing comes from outside."""
        return None

    def register(self, region: Region) -> bytes:
        """Offers the region on the hub; host memory only."""
        if self._region is not None:
            raise StartupError("transport loopback: one transport registers one region")
        if region.device != "cpu":
            raise StartupError("transport loopback: it copies host memory only")
        self._region = region
        self._hub.live[self.name] = self
        return msgspec.msgpack.encode(_Metadata(self.name))

    def connect(self, metadata: bytes) -> Peer:
        """Finds the peer on the hub."""
        ours = self._own_region()
        try:
            name = msgspec.msgpack.decode(metadata, type=_Metadata).name
        except msgspec.DecodeError as error:
            raise TransferFailed("the peer's metadata is not of this version of the loopback transport") from error
        remote = self._hub.live.get(name)
        if remote is None:
            raise TransferFailed(f"{name} is not on the hub")
        region = remote._own_region()
        check_block_bytes(ours, region)
        peer = Peer(name, region.num_blocks, self._hub.in_stream)
        if peer in self._peers:
            raise TransferFailed(f"{name} is connected already")
        self._peers[peer] = region
        return peer

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Queues the write; `poll` moves it."""
        assert peer.in_stream or not in_stream, f"{peer} takes no writes in stream order"
        ours = self._own_region()
        region = self._peers.get(peer)
        if region is None:
            raise TransferFailed(f"{peer.name} is not connected, or released")
        check_pieces(ours, region, pieces)
        if not pieces and notification is None:
            raise ValueError("a post of nothing")
        self._posted += 1
        handle = Handle(self._posted)
        due = self._polls + 1 + self._hub.delay_polls
        self._posts.append(_Post(handle, peer, tuple(pieces), notification, due))
        return handle

    def poll(self) -> Polled:
        """Moves what is due, then hands out what arrived."""
        self._polls += 1
        finished: list[Finished] = []
        if not self._hub.hold and self._hub.live.get(self.name) is self:
            due = [post for post in self._posts if post.due <= self._polls]
            self._posts = [post for post in self._posts if post.due > self._polls]
            finished = [self._move(post) for post in (reversed(due) if self._hub.newest_first else due)]
        arrived, self._inbox = tuple(self._inbox), []
        return Polled(tuple(finished), arrived)

    def release(self, peer: Peer) -> None:
        """Later posts to it raise; what is queued still moves."""
        self._peers.pop(peer, None)

    def close(self) -> None:
        """Leaves the hub; what was queued is dropped."""
        self._hub.kill(self)
        self._posts.clear()
        self._peers.clear()
        self._region = None

    def _own_region(self) -> Region:
        if self._region is None:
            raise TransferFailed("the transport is closed, or has no region registered")
        return self._region

    def _move(self, post: _Post) -> Finished:
        target = self._hub.live.get(post.peer.name)
        if target is None:
            return Finished(post.handle, f"a write to {post.peer.name} failed: it is gone")
        if self._hub.fail_next:
            self._hub.fail_next -= 1
            self._copy(target, post.pieces[: (len(post.pieces) + 1) // 2])
            return Finished(post.handle, f"a write to {post.peer.name} failed, as the hub was told")
        self._copy(target, post.pieces)
        if post.notification is not None:
            target._inbox.append(Notification(self.name, post.notification))
        return Finished(post.handle)

    def _copy(self, target: LoopbackTransport, pieces: Sequence[Piece]) -> None:
        source, destination = self._own_region(), target._own_region()
        for piece in pieces:
            ctypes.memmove(
                destination.address_of(piece.target_block),
                source.address_of(piece.source_block),
                piece.num_blocks * source.block_bytes,
            )
