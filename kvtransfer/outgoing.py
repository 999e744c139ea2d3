"""One attempt to hand one prompt's KV to one destination, part by part."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import TransferFailed
from paceline.kvtransfer.transfer import PartNotification, encode, merge
from paceline.kvtransfer.transports.transport import Finished, Handle, Peer, Piece, Transport
from paceline.types import ReservationId, TokenLogprob, WorkerKey


class OutgoingState(enum.Enum):
    """How an attempt stands. `PENDING` leads to one of the others, and those stay."""

    PENDING = "pending"
    DONE = "done"  # every part arrived, the last included
    FAILED = "failed"  # given up, by the transport or by `abort`; writes may still be under way until `terminal`


@dataclass(slots=True)
class TransferStats:
    """What an attempt, or all of a worker's, has written."""

    parts: int = 0  # that arrived, empty ones not counted
    pieces: int = 0  # in those
    blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # in which data moved, or with a write under way; summed over attempts in a total

    def add(self, other: TransferStats) -> None:
        """Sums `other` in."""
        self.parts += other.parts
        self.pieces += other.pieces
        self.blocks += other.blocks
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds


@dataclass(frozen=True, slots=True)
class _Part:
    pieces: tuple[Piece, ...]
    notification: bytes | None

    @property
    def blocks(self) -> int:
        return sum(piece.num_blocks for piece in self.pieces)


class Outgoing:
    """Writes parts under one (reservation, attempt). Made by `TransferAgent.outgoing`, moved on by
    `TransferAgent.poll`.

    The last part is posted only when all earlier handles are done, since handles promise no order: so when its
    notification arrives, everything has. Faults never raise here. They make the state FAILED, which `poll` reports,
    and from then on, as after `abort`, nothing more is posted and further parts are ignored. Source blocks belong to
    the transport until `terminal`.
    """

    def __init__(
        self,
        transport: Transport,
        peer: Peer,
        *,
        writer: WorkerKey,
        target: WorkerKey,
        reservation_id: ReservationId,
        attempt: int,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.reservation_id = reservation_id
        self.attempt = attempt
        self.stats = TransferStats()
        self._transport = transport
        self._peer = peer
        self._writer = writer
        self._block_bytes = block_bytes
        self._clock = clock
        self._parts = 0  # announced so far, the last included
        self._last: _Part | None = None  # waiting for the earlier handles
        self._finished = False
        self._last_handle: Handle | None = None
        self._outstanding: dict[Handle, _Part] = {}
        self._under_way_since = 0.0  # while `_outstanding` holds anything
        self._state = OutgoingState.PENDING
        self.error: str | None = None
        """Why the state is FAILED."""
        self.lost = False
        """True where the transport gave a write up, and not we the attempt."""

    def __repr__(self) -> str:
        return (
            f"Outgoing({self.reservation_id}/{self.attempt} to {self.target}, {self._state.value}, "
            f"parts={self._parts}, outstanding={len(self._outstanding)})"
        )

    @property
    def state(self) -> OutgoingState:
        """PENDING until all parts arrived or the attempt is given up."""
        return self._state

    @property
    def terminal(self) -> bool:
        """True when it is settled and the transport will never touch memory for it again: its blocks may change."""
        return self._state is not OutgoingState.PENDING and not self._outstanding

    @property
    def in_stream(self) -> bool:
        """Whether parts can be written whose blocks the device is yet to fill."""
        return self._peer.in_stream

    def write_part(
        self, source_blocks: Sequence[int], target_blocks: Sequence[int], *, in_stream: bool = False
    ) -> None:
        """Writes `source_blocks[i]` of our pool to `target_blocks[i]` of the target's, and announces it.

        A part may be empty, where the target holds the blocks already. With `in_stream` the blocks are those that what
        was launched on the device fills. RuntimeError after `finish`, ValueError for lists of different lengths.
        """
        part = self._next_part(source_blocks, target_blocks, last=False)
        self._post(part, in_stream=in_stream)

    def finish(
        self,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        first_tokens: Sequence[int],
        first_logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """The last part, with the token ids sampled from the prompt's end. It leaves when all earlier ones arrived."""
        self._last = self._next_part(
            source_blocks,
            target_blocks,
            last=True,
            first_tokens=tuple(first_tokens),
            first_logprobs=tuple(first_logprobs),
        )
        self._finished = True
        self._post_last_when_due()

    def abort(self, reason: str = "aborted") -> None:
        """Posts nothing more. FAILED at once where it was PENDING; terminal when what is under way has ended."""
        if self._state is OutgoingState.PENDING:
            self._state = OutgoingState.FAILED
            self.error = reason
            self._last = None

    def write_silently(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        """Writes without a part or a notification: what a bandwidth measurement does to granted blocks."""
        self._post(_Part(tuple(merge(source_blocks, target_blocks)), None))

    @property
    def idle(self) -> bool:
        """True where no handle is outstanding, whatever may still be posted."""
        return not self._outstanding

    def owns(self, handle: Handle) -> bool:
        """True where the handle is one of this attempt's, still outstanding."""
        return handle in self._outstanding

    def on_finished(self, finished: Finished) -> int:
        """Takes one of its handles, now terminal; returns the bytes that arrived with it. For `TransferAgent` alone."""
        part = self._outstanding.pop(finished.handle)
        if finished.seconds is not None:
            self.stats.seconds += finished.seconds
        elif not self._outstanding:
            self.stats.seconds += self._clock() - self._under_way_since
        if finished.error is not None:
            self.lost = True
            self.abort(finished.error)
            return 0
        num_bytes = part.blocks * self._block_bytes
        # A part without blocks says that its writer lives, and one without a notification is a measurement.
        parts = int(bool(part.pieces) and part.notification is not None)
        self.stats.add(TransferStats(parts, len(part.pieces), part.blocks, num_bytes))
        if finished.handle == self._last_handle and self._state is OutgoingState.PENDING:
            self._state = OutgoingState.DONE
        self._post_last_when_due()
        return num_bytes

    def _next_part(
        self,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        *,
        last: bool,
        first_tokens: tuple[int, ...] = (),
        first_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> _Part:
        if self._finished:
            raise RuntimeError(f"{self} is finished: no part can follow the last")
        pieces = merge(source_blocks, target_blocks)
        notification = PartNotification(
            writer=self._writer,
            target_epoch=self.target.epoch,
            reservation_id=self.reservation_id,
            attempt=self.attempt,
            part=self._parts,
            num_blocks=len(source_blocks),
            last=last,
            total_parts=self._parts + 1 if last else 0,
            first_tokens=first_tokens,
            first_logprobs=first_logprobs,
        )
        self._parts += 1
        return _Part(tuple(pieces), encode(notification))

    def _post_last_when_due(self) -> None:
        if self._last is not None and not self._outstanding:
            part, self._last = self._last, None
            self._last_handle = self._post(part)

    def _post(self, part: _Part, *, in_stream: bool = False) -> Handle | None:
        """The handle, or None where nothing was posted: the attempt is given up, or is so now."""
        if self._state is not OutgoingState.PENDING:
            return None
        if not self._outstanding:  # before the post, for one over shared memory is over when it returns
            self._under_way_since = self._clock()
        try:
            handle = self._transport.post(self._peer, part.pieces, part.notification, in_stream=in_stream)
        except TransferFailed as error:
            self.lost = True
            self.abort(error.message)
            return None
        self._outstanding[handle] = part
        return handle
