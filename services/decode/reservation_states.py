"""A reservation's states and the one table of its transitions: pure, without I/O and without a clock.

::

    none ──► RESERVED(a) ──claim──► FILLING(a) ──all parts──► LANDED ──step──► RUNNING
                 │  ▲                  │                                         │ ▲
                 │  └──retry, once─────┤                                 preempt │ │ computed
                 └──────then───────────┴──────────────► LOCAL ◄──────────────────┘─┘

`decide` takes a reservation, an event and the time; it returns the next reservation and what is to be done. `attempt`
counts from 1. Blocks are the reservation's in RESERVED and FILLING, and the engine's in LOCAL, LANDED and RUNNING.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

from paceline.errors import AlreadyLanded, WrongAttempt
from paceline.services.decode.reservation_actions import (
    AbortWriter,
    Action,
    End,
    FreeBlocks,
    Grant,
    Land,
    NewTarget,
    PoolAction,
    QuarantineBlocks,
    Refuse,
    StartLocalPrefill,
    WantBlocks,
    no_blocks_error,
)
from paceline.services.decode.reservation_events import (
    B,
    Cancel,
    Claim,
    EndCause,
    Finished,
    NewBlocks,
    NonFinite,
    Part,
    Preempted,
    PromptComputed,
    ReservationEvent,
    Retarget,
    RetryCause,
    StepTaken,
    Target,
    TimedOut,
    WriteFailed,
    WriterProvenDead,
    WriterTerminal,
)
from paceline.types import ReservationId, TokenLogprob, WorkerKey

CLAIM_S = 10.0
"""Seconds that a reservation waits for its claim."""
SILENCE_S = 10.0
"""Seconds that a writer may be silent; each part starts them anew."""
MAX_ATTEMPTS = 2
"""Attempts at a remote prefill before D computes the prompt itself."""


class State(enum.Enum):
    """Where a reservation stands. ENDED is only named: an ended reservation is forgotten."""

    RESERVED = "reserved"  # blocks held, no writer
    FILLING = "filling"  # blocks held, one writer
    LOCAL = "local"  # the engine computes the prompt itself, first or again
    LANDED = "landed"  # all parts are there, the engine's next step takes it
    RUNNING = "running"
    ENDED = "ended"


class Ignored(enum.Enum):
    """Why an event changed nothing."""

    UNKNOWN_RESERVATION = "unknown_reservation"
    WRONG_ATTEMPT = "wrong_attempt"
    WRONG_WRITER = "wrong_writer"  # another worker than the one that claimed
    STALE_EPOCH = "stale_epoch"  # another life of a worker than the one that counts
    WRONG_STATE = "wrong_state"
    DOUBLE_PART = "double_part"
    CONTRADICTORY_PART = "contradictory_part"  # past the last part, or a second and different last one
    REPEATED = "repeated"  # a call that had been answered, and got the same answer again
    ALREADY_LANDED = "already_landed"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a reservation waits, in seconds."""

    claim_s: float = CLAIM_S
    silence_s: float = SILENCE_S


PATIENT = Patience()


@dataclass(frozen=True)
class Reservation(Generic[B]):
    """One reservation between two events. `0 <= len(parts) <= total_parts`, with equality only once it has landed."""

    id: ReservationId
    state: State
    attempt: int
    blocks: B | None  # None where the engine has them
    deadline: float | None  # monotonic seconds; None where the engine drives it on
    patience: Patience = PATIENT
    writer: WorkerKey | None = None
    writer_terminal: bool = False  # the writer has said that it will not write any more
    retry_cause: RetryCause | None = None  # why the last attempt was given up
    parts: frozenset[int] = frozenset()
    total_parts: int | None = None  # known once the last part is there
    first_tokens: tuple[int, ...] = ()
    first_logprobs: tuple[TokenLogprob, ...] = ()
    landed_parts: int = 0  # with blocks
    landed_blocks: int = 0

    @property
    def has_landed(self) -> bool:
        """True once all parts are there, also where their blocks were taken away again since."""
        return len(self.parts) == self.total_parts

    @property
    def may_be_written(self) -> bool:
        """True while someone was granted these blocks and has not said that it is done."""
        return self.state is State.FILLING and not self.writer_terminal


@dataclass(frozen=True)
class Step(Generic[B]):
    """The outcome of an event. `after` is None for an ended reservation; `ignored` says why nothing changed."""

    after: Reservation[B] | None
    actions: tuple[Action[B] | PoolAction[B], ...] = ()
    ignored: Ignored | None = None


TableEvent: TypeAlias = ReservationEvent | TimedOut | NewBlocks[B] | WriterProvenDead


def reserved(reservation: ReservationId, blocks: B, now: float, patience: Patience) -> Reservation[B]:
    """The first row: a request that fits is RESERVED(1)."""
    deadline = now + patience.claim_s
    return Reservation(reservation, State.RESERVED, attempt=1, blocks=blocks, deadline=deadline, patience=patience)


def decide(r: Reservation[B], event: TableEvent[B], now: float) -> Step[B]:
    """The table. Every pair of state and event that has no row of its own is ignored, and counted by the caller."""
    if (unfit := _unfit(r, event)) is not None:
        return unfit
    match r.state, event:
        case State.RESERVED, Claim(writer=writer):
            return _fill(r, writer, now)
        case State.RESERVED, Cancel(cause=cause):
            return _end(r, cause)
        case State.RESERVED, Retarget(to=to):
            return _retry(r, RetryCause.RETARGETED, now, to)
        case State.RESERVED, TimedOut():
            return _retry(r, RetryCause.NOT_CLAIMED, now)
        case ((State.RESERVED | State.LOCAL), NewBlocks(blocks=blocks, cause=why)):
            return _settle(r, blocks, why)

        case State.FILLING, Part() as part:
            return _take(r, part, now)
        case State.FILLING, Cancel(cause=cause):
            return _end(r, cause)
        case State.FILLING, Retarget(to=to):
            return _retry(r, RetryCause.RETARGETED, now, to)
        case State.FILLING, WriteFailed():
            return _retry(r, RetryCause.WRITE_FAILED, now)
        case State.FILLING, TimedOut():
            return _retry(r, RetryCause.SILENT, now)
        case State.FILLING, WriterTerminal():
            return Step(replace(r, writer_terminal=True), ignored=Ignored.REPEATED if r.writer_terminal else None)
        case State.FILLING, WriterProvenDead():
            return _retry(replace(r, writer_terminal=True), RetryCause.WRITER_DEAD, now)

        case State.LOCAL, PromptComputed():
            return Step(replace(r, state=State.RUNNING))
        case State.LANDED, StepTaken():
            return Step(replace(r, state=State.RUNNING))
        case ((State.LANDED | State.RUNNING), Retarget()):
            return _refuse_landed(r)
        case ((State.LANDED | State.RUNNING), Preempted()):
            return Step(replace(r, state=State.LOCAL))
        case ((State.LOCAL | State.LANDED | State.RUNNING), Finished()):
            return _end(r, EndCause.FINISHED)
        case ((State.LOCAL | State.LANDED | State.RUNNING), Cancel(cause=cause)):
            return _end(r, cause)
        case ((State.LOCAL | State.LANDED | State.RUNNING), NonFinite()):
            return _end(r, EndCause.NON_FINITE)

        case _, Claim(writer=writer):
            return _claim_again(r, writer)
        case State.LOCAL, Retarget():
            return _refuse_landed(r) if r.has_landed else _target_again(r)
        case ((State.LANDED | State.RUNNING), Part()):
            return Step(r, ignored=Ignored.DOUBLE_PART)
        case _:
            return Step(r, ignored=Ignored.WRONG_STATE)


def _unfit(r: Reservation[B], event: TableEvent[B]) -> Step[B] | None:
    """The row for any state: a wrong attempt, writer or epoch changes nothing. None where the event fits."""
    match event:
        case Retarget(attempt=attempt) if (
            attempt == r.attempt - 1 and r.state in (State.RESERVED, State.LOCAL) and not r.has_landed
        ):
            # A repeated call, or one that crossed the timer that had already given the attempt up.
            return _target_again(r)
        case Claim(attempt=attempt) | Retarget(attempt=attempt) if attempt != r.attempt:
            return _refuse_attempt(r, f"attempt {attempt} is not the current one, {r.attempt}")
        case Part() | WriteFailed() | WriterTerminal() if event.attempt != r.attempt:
            return Step(r, ignored=Ignored.WRONG_ATTEMPT)
        case Part() | WriteFailed() | WriterTerminal() | WriterProvenDead() if event.writer != r.writer:
            same_worker = r.writer is not None and event.writer.worker_id == r.writer.worker_id
            return Step(r, ignored=Ignored.STALE_EPOCH if same_worker else Ignored.WRONG_WRITER)
        case _:
            return None


def _fill(r: Reservation[B], writer: WorkerKey, now: float) -> Step[B]:
    after = replace(r, state=State.FILLING, writer=writer, deadline=now + r.patience.silence_s)
    return Step(after, (_grant(after, writer),))


def _grant(r: Reservation[B], writer: WorkerKey) -> Grant[B]:
    assert r.blocks is not None, "a reservation that can be claimed has its blocks"
    return Grant(r.id, r.attempt, writer, r.blocks)


def _claim_again(r: Reservation[B], writer: WorkerKey) -> Step[B]:
    """A claim where there is nothing to claim: the writer's own claim, repeated, gets its first answer again."""
    if r.state in (State.LANDED, State.RUNNING) or r.has_landed:
        return _refuse_landed(r)
    if r.state is not State.FILLING:
        return _refuse_attempt(r, f"attempt {r.attempt} is in state {r.state.value}")
    if writer != r.writer:
        return _refuse_attempt(r, f"attempt {r.attempt} is claimed by {r.writer}")
    if r.writer_terminal:
        return _refuse_attempt(r, f"{writer} has said that it is done with attempt {r.attempt}")
    return Step(r, (_grant(r, writer),), ignored=Ignored.REPEATED)


def _take(r: Reservation[B], part: Part, now: float) -> Step[B]:
    """A part has landed; with the last missing one, in whatever order they came, the writer is gone."""
    if part.part in r.parts:
        return Step(r, ignored=Ignored.DOUBLE_PART)
    parts = r.parts | {part.part}
    total = part.part + 1 if part.last else r.total_parts
    contradictory = part.part < 0 or (part.last and r.total_parts is not None)
    if contradictory or (total is not None and max(parts) >= total):
        return Step(r, ignored=Ignored.CONTRADICTORY_PART)
    after = replace(
        r,
        parts=parts,
        total_parts=total,
        landed_parts=r.landed_parts + (part.num_blocks > 0),
        landed_blocks=r.landed_blocks + part.num_blocks,
        deadline=now + r.patience.silence_s,
    )
    if part.last:
        after = replace(after, first_tokens=part.first_tokens, first_logprobs=part.first_logprobs)
    if len(parts) != total:
        return Step(after)
    assert r.blocks is not None, "a reservation that is written to has its blocks"
    landed = replace(after, state=State.LANDED, blocks=None, deadline=None)
    land = Land(
        r.id,
        r.attempt,
        r.blocks,
        after.first_tokens,
        after.first_logprobs,
        landed_parts=after.landed_parts,
        landed_blocks=after.landed_blocks,
    )
    return Step(landed, (land,))


def _end(r: Reservation[B], cause: EndCause) -> Step[B]:
    return Step(None, (*_leave(r), End(r.id, cause, engine_holds=r.blocks is None)))


def _leave(r: Reservation[B]) -> tuple[Action[B] | PoolAction[B], ...]:
    """What becomes of the blocks when the attempt is given up: free at once unless someone may still write to them."""
    if r.blocks is None:
        return ()
    if not r.may_be_written:
        return (FreeBlocks(r.blocks),)
    assert r.writer is not None, "blocks that may be written to have a writer"
    return (AbortWriter(r.id, r.attempt, r.writer), QuarantineBlocks(r.id, r.attempt, r.writer, r.blocks))


def _retry(r: Reservation[B], cause: RetryCause, now: float, to: Target = Target.REMOTE) -> Step[B]:
    """Another attempt, once, and then LOCAL.

    Blocks that nobody can write to go over to it: that is to free them and reserve as many, which cannot fail.
    """
    local = to is Target.LOCAL or r.attempt >= MAX_ATTEMPTS
    after: Reservation[B] = Reservation(
        r.id,
        State.LOCAL if local else State.RESERVED,
        attempt=r.attempt if local else r.attempt + 1,
        blocks=None,
        deadline=None if local else now + r.patience.claim_s,
        patience=r.patience,
        retry_cause=cause,
    )
    if r.may_be_written:
        return Step(after, (*_leave(r), WantBlocks(cause)))
    return _settle(after, r.blocks, cause)


def _settle(r: Reservation[B], blocks: B | None, cause: RetryCause) -> Step[B]:
    """A new attempt has its blocks; or it has none, and the reservation ends."""
    if blocks is None:
        answer = (Refuse(r.id, no_blocks_error(r.id)),) if cause is RetryCause.RETARGETED else ()
        return Step(None, (*answer, End(r.id, EndCause.NO_BLOCKS, engine_holds=False)))
    if r.state is State.LOCAL:
        return Step(r, (StartLocalPrefill(r.id, blocks), NewTarget(r.id, r.attempt, Target.LOCAL, cause)))
    return Step(replace(r, blocks=blocks), (NewTarget(r.id, r.attempt, Target.REMOTE, cause),))


def _target_again(r: Reservation[B]) -> Step[B]:
    target = Target.LOCAL if r.state is State.LOCAL else Target.REMOTE
    cause = r.retry_cause or RetryCause.RETARGETED
    return Step(r, (NewTarget(r.id, r.attempt, target, cause),), ignored=Ignored.REPEATED)


def _refuse_landed(r: Reservation[B]) -> Step[B]:
    error = AlreadyLanded(f"attempt {r.attempt} of reservation {r.id} has landed")
    return Step(r, (Refuse(r.id, error),), ignored=Ignored.ALREADY_LANDED)


def _refuse_attempt(r: Reservation[B], why: str) -> Step[B]:
    return Step(r, (Refuse(r.id, WrongAttempt(f"reservation {r.id}: {why}")),), ignored=Ignored.WRONG_ATTEMPT)
