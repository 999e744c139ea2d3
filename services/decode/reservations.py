"""All reservations of one decode worker: the table of `reservation_states` applied, with its timers and its quarantine.

It runs inside the worker's loop, which feeds it events and carries out the actions that come back. It has no clock: the
loop passes monotonic seconds, sleeps no longer than `next_deadline`, and calls `expire`.

A block handle is at any moment in exactly one place: a reservation (RESERVED, FILLING), the quarantine, the engine
(handed over by one `Land` or `StartLocalPrefill`), or released. It is released here, once, unless the engine has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

from paceline.errors import InvalidRequest, StaleEpoch, UnknownReservation, quote
from paceline.services.decode.quarantine import ALARM_S, DRAIN_FRACTION, Quarantine, QuarantineKey
from paceline.services.decode.reservation_actions import (
    Action,
    End,
    FreeBlocks,
    NewTarget,
    QuarantineBlocks,
    Refuse,
    StartLocalPrefill,
    WantBlocks,
)
from paceline.services.decode.reservation_events import (
    B,
    Claim,
    EndCause,
    Event,
    NewBlocks,
    ReservationEvent,
    Retarget,
    RetryCause,
    TimedOut,
    WriterProvenDead,
    WriterReplaced,
    WriterTerminal,
)
from paceline.services.decode.reservation_states import (
    PATIENT,
    Ignored,
    Patience,
    Reservation,
    State,
    Step,
    TableEvent,
    decide,
    reserved,
)
from paceline.services.decode.timers import Timers
from paceline.types import ReservationId, WorkerKey


class Reservations(Generic[B]):
    """The live reservations. `created == len(self) + sum(ended.values())`.

    `allocate` gives blocks for another attempt of a reservation, or None where the pool has no room.
    """

    def __init__(
        self,
        *,
        pool_blocks: int,
        allocate: Callable[[ReservationId], B | None],
        patience: Patience = PATIENT,
        alarm_s: float = ALARM_S,
        drain_fraction: float = DRAIN_FRACTION,
    ) -> None:
        self._allocate = allocate
        self._live: dict[ReservationId, Reservation[B]] = {}
        self._in_state: Counter[State] = Counter()  # how many of them
        self._timers: Timers[ReservationId] = Timers()
        self._quarantine: Quarantine[B] = Quarantine(pool_blocks, alarm_s=alarm_s, drain_fraction=drain_fraction)
        self._patience = patience
        self._oldest_epoch: dict[str, int] = {}  # by worker id: every earlier life is proven dead
        self.created = 0
        self.ended: Counter[EndCause] = Counter()
        self.ended_in: Counter[tuple[State, EndCause]] = Counter()  # the same, by the state that the end found too
        self.ignored: Counter[Ignored] = Counter()
        self.retries: Counter[RetryCause] = Counter()

    def __len__(self) -> int:
        """Reservations that have not ended."""
        return len(self._live)

    def __contains__(self, reservation: ReservationId) -> bool:
        """True while the reservation has not ended."""
        return reservation in self._live

    def get(self, reservation: ReservationId) -> Reservation[B] | None:
        """The reservation as it stands; None where it is unknown or has ended."""
        return self._live.get(reservation)

    def count(self, *states: State) -> int:
        """Live reservations in any of these states."""
        return sum(self._in_state[state] for state in states)

    @property
    def outstanding(self) -> bool:
        """True while a claim, a part or the end of a given-up writer is awaited: the loop polls its transport.

        A writer whose target does not poll may never be able to end what it has begun.
        """
        return self._timers.next() is not None or len(self._quarantine) > 0

    @property
    def quarantined_blocks(self) -> int:
        """Blocks that a given-up writer may still write to."""
        return self._quarantine.num_blocks

    @property
    def quarantined_attempts(self) -> int:
        """Attempts whose blocks are in quarantine."""
        return len(self._quarantine)

    def create(self, reservation: ReservationId, blocks: B, now: float) -> None:
        """RESERVED(1): takes the handle over and waits for a claim.

        Raises `InvalidRequest` where the id is in use; the handle then stays with the caller.
        """
        self._admit(reserved(reservation, blocks, now, self._patience))

    def create_local(self, reservation: ReservationId, blocks: B) -> list[Action[B]]:
        """LOCAL from the start, for a prompt that no prefill worker is to compute. Raises as `create` does."""
        self._admit(
            Reservation(reservation, State.LOCAL, attempt=1, blocks=None, deadline=None, patience=self._patience)
        )
        return [StartLocalPrefill(reservation, blocks)]

    def handle(self, event: Event, now: float) -> list[Action[B]]:
        """Applies one event. A `Claim` or `Retarget` gets exactly one answer: `Grant`, `NewTarget` or `Refuse`."""
        match event:
            case WriterProvenDead(writer=writer):
                return self._writers_dead(writer.worker_id, writer.epoch + 1, lambda key: key == writer, now)
            case WriterReplaced(by=by):
                return self._writers_dead(
                    by.worker_id, by.epoch, lambda key: key.worker_id == by.worker_id and key.epoch < by.epoch, now
                )
            case WriterTerminal() if self._quarantine.writer_terminal(
                QuarantineKey(event.reservation, event.attempt, event.writer)
            ):
                return []
            case Claim(writer=writer) if writer.epoch < self._oldest_epoch.get(writer.worker_id, writer.epoch):
                self.ignored[Ignored.STALE_EPOCH] += 1
                return [
                    Refuse(event.reservation, StaleEpoch(f"{quote(str(writer))} is an earlier life of that worker"))
                ]
        record = self._live.get(event.reservation)
        return self._unknown(event) if record is None else self._apply(record, event, now)

    def expire(self, now: float) -> list[Action[B]]:
        """Carries out every timer that is due at `now`."""
        actions: list[Action[B]] = []
        for reservation in self._timers.pop_due(now):
            actions += self._apply(self._live[reservation], TimedOut(reservation), now)
        actions += self._quarantine.expire(now)
        return actions

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do, in monotonic seconds; None: not before another event."""
        return min((t for t in (self._timers.next(), self._quarantine.next_deadline()) if t is not None), default=None)

    def _admit(self, record: Reservation[B]) -> None:
        if record.id in self._live or self._quarantine.holds(record.id):
            raise InvalidRequest("reservation", f"{quote(record.id)} is in use: each request needs an id of its own")
        self.created += 1
        self._store(record)

    def _apply(self, record: Reservation[B], event: TableEvent[B], now: float) -> list[Action[B]]:
        step = decide(record, event, now)
        if step.ignored is not None:
            self.ignored[step.ignored] += 1
        if step.after is None:
            del self._live[record.id]
            self._in_state[record.state] -= 1
            self._timers.cancel(record.id)
        else:
            self._store(step.after)
        return self._carry_out(step, record, now)

    def _store(self, record: Reservation[B]) -> None:
        if (before := self._live.get(record.id)) is not None:
            self._in_state[before.state] -= 1
        self._in_state[record.state] += 1
        self._live[record.id] = record
        if record.deadline is None:
            self._timers.cancel(record.id)
        else:
            self._timers.set(record.id, record.deadline)

    def _carry_out(self, step: Step[B], record: Reservation[B], now: float) -> list[Action[B]]:
        """Does what concerns the pool; passes the rest on. `record` is the reservation as the event found it."""
        actions: list[Action[B]] = []
        for action in step.actions:
            match action:
                case FreeBlocks(blocks=blocks):
                    blocks.release()
                case QuarantineBlocks():
                    self._quarantine.add(action, now)
                case WantBlocks(cause=cause):
                    assert step.after is not None, "only a live reservation wants blocks"
                    blocks_or_none = self._allocate(step.after.id)
                    outcome = NewBlocks(step.after.id, blocks_or_none, cause)
                    actions += self._apply(step.after, outcome, now)
                case _:
                    self._count(action, step, record.state)
                    actions.append(action)
        return actions

    def _count(self, action: Action[B], step: Step[B], state: State) -> None:
        match action:
            case End(cause=cause):
                self.ended[cause] += 1
                self.ended_in[state, cause] += 1
            case NewTarget(cause=why) if step.ignored is None:
                self.retries[why] += 1

    def _unknown(self, event: ReservationEvent) -> list[Action[B]]:
        self.ignored[Ignored.UNKNOWN_RESERVATION] += 1
        match event:
            case Claim() | Retarget():
                error = UnknownReservation(f"reservation {quote(event.reservation)} is unknown, or has ended")
                return [Refuse(event.reservation, error)]
            case _:
                return []

    def _writers_dead(
        self, worker_id: str, next_epoch: int, is_dead: Callable[[WorkerKey], bool], now: float
    ) -> list[Action[B]]:
        """Lets go of what the dead held, quarantine first, so that its blocks can serve another attempt."""
        self._oldest_epoch[worker_id] = max(next_epoch, self._oldest_epoch.get(worker_id, next_epoch))
        self._quarantine.writers_dead(is_dead)
        actions: list[Action[B]] = []
        for record in list(self._live.values()):
            if record.state is State.FILLING and record.writer is not None and is_dead(record.writer):
                actions += self._apply(record, WriterProvenDead(record.writer), now)
        return actions
