"""The seam behind which bytes move: register, connect, post, poll, release, close. No library's object crosses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import FingerprintMismatch, TransferFailed
from paceline.kvtransfer.region import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_blocks` blocks that are neighbours in both pools: one descriptor on the wire."""

    source_block: int
    target_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected peer. `name` is unique to one life of its transport: a restarted peer never equals its past.

    A write to one that is reached `in_stream` can be put behind what was launched on the device before it.
    """

    name: str
    num_blocks: int
    in_stream: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """One post on its way. Unique within its transport, never used again."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A handle that became terminal. `error` is None where the data and the notification are with the peer."""

    handle: Handle
    error: str | None = None
    seconds: float | None = None  # in which data moved; None: all the time since the post, for all that is known

    @property
    def ok(self) -> bool:
        """True where all of the post arrived."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class Notification:
    """A message behind a peer's post, visible only after all of the post's data. `sender` is the peer's own word."""

    sender: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Polled:
    """What happened since the last poll."""

    finished: tuple[Finished, ...] = ()
    notifications: tuple[Notification, ...] = ()


class Transport(Protocol):
    """Moves blocks from the registered region of this process into a peer's.

    One thread calls it, the one that owns the pool. Nothing moves by itself: while a handle is outstanding at the
    sender *or* a write is awaited at the target, both poll at most 200 us apart. An idle transport burns no CPU and
    need not be polled.

    A handle is terminal when the transport will never again read this side's memory, nor send anything to the peer's,
    on its behalf; only `poll` says so. Until then its source blocks must keep their contents. No order is promised
    between handles, nor between their notifications: whoever needs an order posts the later one when the earlier is
    terminal.
    """

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when `poll` has something to do that came from outside. None where there is no such descriptor.

        For a loop that sleeps: it may wait on it beside its own descriptors, and poll when it is readable. It is no
        substitute for polling at 200 us, for it does not tell of writes of this side that are done. A loop that
        ignores it loses nothing but memory: the mapped pool of a peer that died stays until the next poll.
        """
        ...

    def register(self, region: Region) -> bytes:
        """Offers `region`, once, and returns what peers need to write to it.

        The bytes grant writes to all of the region: they go to resolved peers alone, never to a log or a client. Raises
        `StartupError` where the memory cannot be registered.
        """
        ...

    def connect(self, metadata: bytes) -> Peer:
        """Makes the peer that `register`ed as `metadata` a target. Only a writer needs it, once it has registered.

        Returns without waiting for the peer, so that a dead one may pass, and its first write fail. Raises
        `FingerprintMismatch` where its blocks have another size, `TransferFailed` where the metadata is unusable,
        or its peer is connected already or known to be dead.
        """
        ...

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Starts writing the pieces to the peer, and then, if all of them arrived, the notification.

        `pieces` may be empty if there is a notification. Pieces of one post must not overlap in the target. It may
        return before or after the data moved. With `in_stream`, which not every peer takes, the write begins when all
        work is done that this thread has launched on the device: that may be what fills the blocks. Raises
        `TransferFailed`, with nothing posted, for blocks outside either pool and for a peer that is released or known
        to be lost.
        """
        ...

    def poll(self) -> Polled:
        """Makes progress both ways, and tells what became terminal and what arrived. Never blocks, never raises."""
        ...

    def release(self, peer: Peer) -> None:
        """Forgets a peer: later posts to it raise. Handles under way stay so, and `poll` still ends each of them."""
        ...

    def close(self) -> None:
        """Ends the transport; a second call does nothing. The region may be freed then if no handle is outstanding."""
        ...


def check_block_bytes(ours: Region, theirs: Region) -> None:
    """Raises `FingerprintMismatch` where a peer's blocks have another size than ours."""
    if theirs.block_bytes != ours.block_bytes:
        raise FingerprintMismatch(f"block_bytes differs: {ours.block_bytes} here, {theirs.block_bytes} at the peer")


def check_pieces(source: Region, target: Region, pieces: Sequence[Piece]) -> None:
    """Raises `TransferFailed` for the first piece outside either pool: a stray write would spoil another request's
    KV.
    """
    for piece in pieces:
        if not source.holds(piece.source_block, piece.num_blocks):
            raise TransferFailed(f"{piece} is outside our pool of {source.num_blocks} blocks")
        if not target.holds(piece.target_block, piece.num_blocks):
            raise TransferFailed(f"{piece} is outside the peer's pool of {target.num_blocks} blocks")
