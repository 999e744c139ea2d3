"""A worker's end of every hand-off: the peers it knows, what it is writing, and what has landed in its pool.

The life of a hand-off, seen from here. P connects to D's (id, epoch) after the fingerprints agreed, opens an
`Outgoing` for a claimed (reservation, attempt), writes parts as blocks are finished, and polls. D only polls: each
part that landed is a `PartNotification`, in any order. Whose blocks those are is for D's reservations to know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from paceline.errors import StaleEpoch, TransferFailed
from paceline.kvtransfer.layout import Fingerprint
from paceline.kvtransfer.outgoing import Outgoing, OutgoingState, TransferStats
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transfer import PartNotification, decode
from paceline.kvtransfer.transports.transport import Peer, Polled, Transport
from paceline.types import ReservationId, WorkerKey

SETTLE_S = 1.0
"""Seconds for which a target polls on after a writer's end is proven, before blocks that it wrote to may be reused.

Over TCP, bytes of a write lie in kernel buffers when their writer dies, and the target's own progress writes them to
its pool later: 1.4 MB were seen. Draining them takes milliseconds; a second leaves room for the network to repeat
itself.
"""


@dataclass(frozen=True, slots=True)
class AgentEvents:
    """What happened since the last poll. An `Outgoing` is once in `settled` and once in `terminal`, maybe together."""

    parts: tuple[PartNotification, ...] = ()  # landed in our pool
    settled: tuple[Outgoing, ...] = ()  # became DONE or FAILED
    terminal: tuple[Outgoing, ...] = ()  # their source blocks may change, and nothing of theirs will be sent any more
    drained: tuple[Hashable, ...] = ()  # keys given to `drain`: nothing their writers sent can land any more
    bytes_written: int = 0  # by posts that arrived

    def __bool__(self) -> bool:
        return bool(self.parts or self.settled or self.terminal or self.drained or self.bytes_written)


@dataclass(slots=True)
class AgentStats:
    """Counters since the start."""

    written: TransferStats = field(default_factory=TransferStats)  # of all terminal attempts
    done: int = 0
    failed: int = 0
    parts_received: int = 0
    blocks_received: int = 0
    ignored: int = 0  # notifications that are no notifications of this version
    stale: int = 0  # notifications for an earlier epoch of this worker


class TransferAgent:
    """Joins one transport, one region and one worker. One thread calls it, the one that owns the pool."""

    def __init__(
        self,
        transport: Transport,
        worker: WorkerKey,
        region: Region,
        fingerprint: Fingerprint,
        *,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers `region`; `StartupError` where that fails."""
        self.worker = worker
        self.fingerprint = fingerprint
        self.stats = AgentStats()
        self._transport = transport
        self._region = region
        self._settle_s = settle_s
        self._clock = clock
        self._metadata = transport.register(region)
        self._peers: dict[WorkerKey, Peer] = {}
        self._newest: dict[str, int] = {}  # the highest epoch ever connected, by worker id
        self._outgoings: list[Outgoing] = []  # not terminal yet
        self._unsettled: set[Outgoing] = set()
        self._draining: dict[Hashable, float | None] = {}  # when each may be reported; None until it was polled once
        self._parts: list[PartNotification] = []  # landed, not yet reported
        self._bytes_written = 0

    def __repr__(self) -> str:
        return f"TransferAgent({self.worker}, peers={len(self._peers)}, outgoings={len(self._outgoings)})"

    def metadata(self) -> bytes:
        """What a peer needs to write to our pool. It grants just that: never to a log, never to a client."""
        return self._metadata

    @property
    def peers(self) -> frozenset[WorkerKey]:
        """Those that can be written to."""
        return frozenset(self._peers)

    @property
    def busy(self) -> bool:
        """True while a write of ours is under way or a drain is: poll at most 200 us apart.

        A target that waits for somebody's write must poll as often; only its reservations know that it waits.
        """
        return bool(self._outgoings or self._draining)

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when a loop that sleeps should poll, whether it is `busy` or not. None: the transport has none."""
        return self._transport.wake_descriptor

    def connect_peer(self, key: WorkerKey, metadata: bytes, fingerprint: Fingerprint) -> None:
        """Makes a peer writable, and drops earlier epochs of the same id. Does nothing where `key` is connected.

        Raises `FingerprintMismatch`, `StaleEpoch` where a newer epoch was connected before, and `TransferFailed` for
        metadata that is unusable or whose peer is dead.
        """
        if key in self._peers:
            return
        self.fingerprint.check(fingerprint)
        newest = self._newest.get(key.worker_id, key.epoch)
        if key.epoch < newest:
            raise StaleEpoch(f"{key} has been replaced by epoch {newest}")
        for earlier in [known for known in self._peers if known.worker_id == key.worker_id]:
            self.drop_peer(earlier)
        self._peers[key] = self._transport.connect(metadata)
        self._newest[key.worker_id] = key.epoch

    def drop_peer(self, key: WorkerKey) -> None:
        """Aborts what goes to the peer and forgets it. Handles under way still end, through `poll`; unknown is fine."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        for outgoing in self._outgoings:
            if outgoing.target == key:
                outgoing.abort(f"{key} was dropped")
        self._transport.release(peer)

    def outgoing(self, target: WorkerKey, reservation_id: ReservationId, attempt: int) -> Outgoing:
        """Opens an attempt that `target` has granted; `TransferFailed` where that peer is not connected."""
        peer = self._peers.get(target)
        if peer is None:
            raise TransferFailed(f"{target} is not connected")
        outgoing = Outgoing(
            self._transport,
            peer,
            writer=self.worker,
            target=target,
            reservation_id=reservation_id,
            attempt=attempt,
            block_bytes=self._region.block_bytes,
            clock=self._clock,
        )
        self._outgoings.append(outgoing)
        self._unsettled.add(outgoing)
        return outgoing

    def drain(self, key: Hashable) -> None:
        """On a target: a writer's end is proven; `poll` reports `key` when nothing that it sent can land any more.

        Call it with the quarantined attempt once its writer said terminal, or is proven dead, and free the blocks on
        the report.
        """
        self._draining[key] = None

    def poll(self) -> AgentEvents:
        """Makes progress in both directions and tells what happened. Never blocks, never raises."""
        self._progress()
        settled = [
            each for each in self._outgoings if each in self._unsettled and each.state is not OutgoingState.PENDING
        ]
        terminal = [each for each in self._outgoings if each.terminal]
        self._unsettled.difference_update(settled)
        if terminal:
            self._outgoings = [each for each in self._outgoings if not each.terminal]
        for each in terminal:
            self.stats.written.add(each.stats)
            self.stats.done += each.state is OutgoingState.DONE
            self.stats.failed += each.state is OutgoingState.FAILED
        parts, self._parts = tuple(self._parts), []
        bytes_written, self._bytes_written = self._bytes_written, 0
        return AgentEvents(parts, tuple(settled), tuple(terminal), self._drained(), bytes_written)

    def measure(
        self,
        outgoing: Outgoing,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        *,
        repeats: int = 3,
        timeout_s: float = 5.0,
    ) -> float:
        """Bytes a second of the fastest of `repeats` writes of the blocks, after one that is not counted. It waits.

        For the start of a pair, when the peer has granted `outgoing` blocks of its pool and polls. It sends no
        notification; the caller ends `outgoing` as any other, and raises `SlowTransport` if it minds. Raises
        `TransferFailed` where a write fails or all of it takes longer than `timeout_s`: what is under way then ends
        through `poll`, as ever.
        """
        deadline = self._clock() + timeout_s
        times = [self._timed_write(outgoing, source_blocks, target_blocks, deadline) for _ in range(repeats + 1)]
        return len(source_blocks) * self._region.block_bytes / max(min(times[1:]), 1e-9)

    def close(self) -> None:
        """Ends the transport. With `busy` false, the region's memory may be freed afterwards."""
        for outgoing in self._outgoings:
            outgoing.abort("the worker stops")
        self._peers.clear()
        self._transport.close()

    def _timed_write(
        self, outgoing: Outgoing, source_blocks: Sequence[int], target_blocks: Sequence[int], deadline: float
    ) -> float:
        started = self._clock()
        outgoing.write_silently(source_blocks, target_blocks)
        while not outgoing.idle:
            self._progress()
            if self._clock() > deadline:
                outgoing.abort("measuring took too long")
                raise TransferFailed(f"measuring the way to {outgoing.target} took too long: is the peer polling?")
        if outgoing.state is OutgoingState.FAILED:
            raise TransferFailed(outgoing.error or "failed")
        return self._clock() - started

    def _progress(self) -> None:
        polled = self._transport.poll()
        self._take_notifications(polled)
        for finished in polled.finished:
            owner = next((each for each in self._outgoings if each.owns(finished.handle)), None)
            assert owner is not None, f"{finished.handle} belongs to no outgoing"
            self._bytes_written += owner.on_finished(finished)

    def _take_notifications(self, polled: Polled) -> None:
        for notification in polled.notifications:
            part = decode(notification.payload)
            if part is None:
                self.stats.ignored += 1
            elif part.target_epoch != self.worker.epoch:
                self.stats.stale += 1
            else:
                self.stats.parts_received += 1
                self.stats.blocks_received += part.num_blocks
                self._parts.append(part)

    def _drained(self) -> tuple[Hashable, ...]:
        # The time counts from a poll to a poll: a loop that was held up has read nothing meanwhile.
        now = self._clock()
        drained = tuple(key for key, due in self._draining.items() if due is not None and due <= now)
        for key in drained:
            del self._draining[key]
        for key in [key for key, due in self._draining.items() if due is None]:
            self._draining[key] = now + self._settle_s
        return drained
