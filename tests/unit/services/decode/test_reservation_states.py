"""Each row of the table by itself, and the timers around it."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import pytest

from paceline.errors import (
    AlreadyLanded,
    DeadlineExceeded,
    InvalidRequest,
    NumericalError,
    Overloaded,
    PacelineError,
    RequestCancelled,
    StaleEpoch,
    UnknownReservation,
    WrongAttempt,
)
from paceline.services.decode.reservation_actions import (
    AbortWriter,
    Action,
    Alarm,
    DrainAndRestart,
    End,
    Grant,
    Land,
    NewTarget,
    Refuse,
    StartLocalPrefill,
)
from paceline.services.decode.reservation_events import (
    Cancel,
    Claim,
    EndCause,
    Event,
    Finished,
    NonFinite,
    Part,
    Preempted,
    PromptComputed,
    Retarget,
    RetryCause,
    StepTaken,
    Target,
    WriteFailed,
    WriterProvenDead,
    WriterReplaced,
    WriterTerminal,
)
from paceline.services.decode.reservation_states import CLAIM_S, SILENCE_S, Ignored, State
from paceline.services.decode.reservations import Reservations
from paceline.types import ReservationId, WorkerKey

R = ReservationId("r")
P = WorkerKey("p", 3)
OTHER = WorkerKey("other", 1)
LATER = WorkerKey("p", 4)
POOL_BLOCKS = 200
GIVEN_UP = (EndCause.CANCELLED, EndCause.STREAM_LOST, EndCause.DEADLINE)


class Lease:
    """Blocks that know whether they were released."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.released = False

    def __len__(self) -> int:
        return self.size

    def release(self) -> None:
        assert not self.released, "released twice"
        self.released = True


Actions: TypeAlias = list[Action[Lease]]


class Bench:
    """Reservations whose allocations are recorded, at a time that the test sets."""

    def __init__(self, *, room: bool = True, size: int = 4) -> None:
        self.room = room
        self.size = size
        self.leases: list[Lease] = []
        self.now = 100.0
        self.all: Reservations[Lease] = Reservations(pool_blocks=POOL_BLOCKS, allocate=self._allocate)

    def _allocate(self, reservation: ReservationId) -> Lease | None:
        return self.lease() if self.room else None

    def lease(self) -> Lease:
        self.leases.append(Lease(self.size))
        return self.leases[-1]

    def feed(self, *events: Event) -> Actions:
        return list(itertools.chain.from_iterable(self.all.handle(event, self.now) for event in events))

    def state(self) -> State:
        record = self.all.get(R)
        return State.ENDED if record is None else record.state

    def attempt(self) -> int:
        record = self.all.get(R)
        assert record is not None
        return record.attempt

    def wait(self, seconds: float) -> Actions:
        self.now += seconds
        return self.all.expire(self.now)


def in_state(state: State, **kwargs: int) -> Bench:
    bench = Bench(**kwargs)
    bench.all.create(R, bench.lease(), bench.now)
    if state is State.RESERVED:
        return bench
    if state is State.LOCAL:
        bench.feed(Retarget(R, 1, Target.LOCAL))
        return bench
    bench.feed(Claim(R, 1, P))
    if state is State.FILLING:
        return bench
    bench.feed(Part(R, 1, P, 0, last=True, first_tokens=(7,)))
    if state is State.RUNNING:
        bench.feed(StepTaken(R))
    assert bench.state() is state
    return bench


def refusal(actions: Actions) -> type[PacelineError]:
    [action] = actions
    assert isinstance(action, Refuse)
    return type(action.error)


# none


def test_a_request_that_fits_is_reserved_under_attempt_one() -> None:
    bench = in_state(State.RESERVED)
    assert (bench.state(), bench.attempt()) == (State.RESERVED, 1)
    assert bench.all.outstanding


def test_an_id_in_use_is_refused_and_its_handle_stays_with_the_caller() -> None:
    bench = in_state(State.RESERVED)
    second = bench.lease()
    with pytest.raises(InvalidRequest):
        bench.all.create(R, second, bench.now)
    with pytest.raises(InvalidRequest):
        bench.all.create_local(R, second)
    assert not second.released
    assert bench.all.created == 1


def test_an_id_whose_blocks_are_in_quarantine_is_refused() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R))
    with pytest.raises(InvalidRequest):
        bench.all.create(R, bench.lease(), bench.now)


def test_a_request_without_a_prefill_worker_starts_local() -> None:
    bench = Bench()
    lease = bench.lease()
    assert bench.all.create_local(R, lease) == [StartLocalPrefill(R, lease)]
    assert bench.state() is State.LOCAL
    assert bench.all.next_deadline() is None


# RESERVED


def test_a_claim_is_granted_the_reserved_blocks_and_fills_them() -> None:
    bench = in_state(State.RESERVED)
    assert bench.feed(Claim(R, 1, P)) == [Grant(R, 1, P, bench.leases[0])]
    assert bench.state() is State.FILLING


@pytest.mark.parametrize("cause", GIVEN_UP)
def test_a_reservation_that_is_given_up_before_its_claim_frees_its_blocks_now(cause: EndCause) -> None:
    bench = in_state(State.RESERVED)
    assert bench.feed(Cancel(R, cause)) == [End(R, cause, engine_holds=False)]
    assert bench.leases[0].released
    assert bench.all.next_deadline() is None


def test_a_retarget_before_the_claim_makes_attempt_two_of_the_same_blocks() -> None:
    bench = in_state(State.RESERVED)
    assert bench.feed(Retarget(R, 1)) == [NewTarget(R, 2, Target.REMOTE, RetryCause.RETARGETED)]
    assert bench.feed(Claim(R, 2, OTHER)) == [Grant(R, 2, OTHER, bench.leases[0])]
    assert len(bench.leases) == 1


def test_a_second_retarget_before_any_claim_goes_local_with_the_same_blocks() -> None:
    bench = in_state(State.RESERVED)
    bench.feed(Retarget(R, 1))
    assert bench.feed(Retarget(R, 2)) == [
        StartLocalPrefill(R, bench.leases[0]),
        NewTarget(R, 2, Target.LOCAL, RetryCause.RETARGETED),
    ]
    assert not bench.leases[0].released


def test_a_retarget_to_local_goes_local_at_the_first_attempt() -> None:
    bench = in_state(State.RESERVED)
    bench.feed(Retarget(R, 1, Target.LOCAL))
    assert bench.state() is State.LOCAL


def test_no_claim_within_ten_seconds_makes_attempt_two_and_then_local() -> None:
    bench = in_state(State.RESERVED)
    assert bench.all.next_deadline() == bench.now + CLAIM_S
    assert bench.wait(CLAIM_S - 0.001) == []
    assert bench.wait(0.001) == [NewTarget(R, 2, Target.REMOTE, RetryCause.NOT_CLAIMED)]
    assert bench.all.next_deadline() == bench.now + CLAIM_S
    assert bench.wait(CLAIM_S) == [
        StartLocalPrefill(R, bench.leases[0]),
        NewTarget(R, 2, Target.LOCAL, RetryCause.NOT_CLAIMED),
    ]
    assert bench.all.next_deadline() is None


def test_a_late_retarget_is_told_the_attempt_that_the_timer_had_already_made() -> None:
    bench = in_state(State.RESERVED)
    bench.wait(CLAIM_S)
    assert bench.feed(Retarget(R, 1)) == [NewTarget(R, 2, Target.REMOTE, RetryCause.NOT_CLAIMED)]
    assert (bench.state(), bench.attempt()) == (State.RESERVED, 2)
    assert bench.all.ignored == {Ignored.REPEATED: 1}


# FILLING


def test_a_repeated_claim_of_the_same_writer_gets_the_same_answer() -> None:
    bench = in_state(State.FILLING)
    assert bench.feed(Claim(R, 1, P)) == [Grant(R, 1, P, bench.leases[0])]
    assert bench.all.ignored == {Ignored.REPEATED: 1}


def test_a_repeated_claim_does_not_restart_the_silence_timer() -> None:
    bench = in_state(State.FILLING)
    deadline = bench.all.next_deadline()
    bench.now += 1
    bench.feed(Claim(R, 1, P))
    assert bench.all.next_deadline() == deadline


@pytest.mark.parametrize("writer", [OTHER, LATER])
def test_a_claim_of_a_claimed_attempt_by_another_writer_is_refused(writer: WorkerKey) -> None:
    bench = in_state(State.FILLING)
    assert refusal(bench.feed(Claim(R, 1, writer))) is WrongAttempt


def test_a_part_restarts_the_silence_timer() -> None:
    bench = in_state(State.FILLING)
    bench.now += SILENCE_S - 1
    assert bench.feed(Part(R, 1, P, 0)) == []
    assert bench.all.next_deadline() == bench.now + SILENCE_S


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_parts_land_the_request_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    bench = in_state(State.FILLING)
    parts = [Part(R, 1, P, 0), Part(R, 1, P, 1), Part(R, 1, P, 2, last=True, first_tokens=(7, 8))]
    for index in order[:-1]:
        assert bench.feed(parts[index]) == []
        assert bench.state() is State.FILLING
    assert bench.feed(parts[order[-1]]) == [Land(R, 1, bench.leases[0], (7, 8))]
    assert bench.state() is State.LANDED
    assert bench.all.next_deadline() is None


@pytest.mark.parametrize("cause", GIVEN_UP)
def test_giving_up_while_a_writer_fills_aborts_it_and_quarantines_its_blocks(cause: EndCause) -> None:
    bench = in_state(State.FILLING)
    assert bench.feed(Cancel(R, cause)) == [AbortWriter(R, 1, P), End(R, cause, engine_holds=False)]
    assert not bench.leases[0].released
    assert (bench.all.quarantined_blocks, bench.all.quarantined_attempts) == (4, 1)


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (WriteFailed(R, 1, P), RetryCause.WRITE_FAILED),
        (Retarget(R, 1), RetryCause.RETARGETED),
        (None, RetryCause.SILENT),
    ],
)
def test_a_lost_writer_is_aborted_and_attempt_two_gets_new_blocks(event: Event | None, cause: RetryCause) -> None:
    bench = in_state(State.FILLING)
    actions = bench.feed(event) if event else bench.wait(SILENCE_S)
    assert actions == [AbortWriter(R, 1, P), NewTarget(R, 2, Target.REMOTE, cause)]
    assert (bench.all.quarantined_blocks, bench.state()) == (4, State.RESERVED)
    assert bench.feed(Claim(R, 2, P)) == [Grant(R, 2, P, bench.leases[1])]
    assert bench.all.retries == {cause: 1}


def test_a_writer_whose_parts_came_is_still_a_writer_until_the_last_missing_one() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Part(R, 1, P, 0), Part(R, 1, P, 2, last=True))
    assert bench.feed(Cancel(R)) == [AbortWriter(R, 1, P), End(R, EndCause.CANCELLED, engine_holds=False)]
    assert not bench.leases[0].released


def test_parts_of_the_first_attempt_do_not_count_for_the_second() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Part(R, 1, P, 0), WriteFailed(R, 1, P), Claim(R, 2, OTHER))
    assert bench.feed(Part(R, 2, OTHER, 1, last=True)) == []
    assert bench.state() is State.FILLING


def test_a_second_lost_writer_makes_the_request_local_with_new_blocks() -> None:
    bench = in_state(State.FILLING)
    bench.feed(WriteFailed(R, 1, P), Claim(R, 2, OTHER))
    assert bench.feed(WriteFailed(R, 2, OTHER)) == [
        AbortWriter(R, 2, OTHER),
        StartLocalPrefill(R, bench.leases[2]),
        NewTarget(R, 2, Target.LOCAL, RetryCause.WRITE_FAILED),
    ]
    assert bench.all.quarantined_attempts == 2


def test_a_lost_writer_ends_the_reservation_when_the_pool_has_no_other_blocks() -> None:
    bench = in_state(State.FILLING)
    bench.room = False
    actions = bench.feed(WriteFailed(R, 1, P))
    assert actions == [AbortWriter(R, 1, P), End(R, EndCause.NO_BLOCKS, engine_holds=False)]
    assert bench.all.quarantined_blocks == 4


def test_a_retarget_that_finds_no_blocks_is_refused_as_overloaded() -> None:
    bench = in_state(State.FILLING)
    bench.room = False
    _, refused, end = bench.feed(Retarget(R, 1))
    assert refusal([refused]) is Overloaded
    assert end == End(R, EndCause.NO_BLOCKS, engine_holds=False)


def test_a_writer_that_said_it_is_done_leaves_blocks_that_need_no_quarantine() -> None:
    bench = in_state(State.FILLING)
    bench.feed(WriterTerminal(R, 1, P))
    assert bench.state() is State.FILLING
    assert bench.feed(Retarget(R, 1)) == [NewTarget(R, 2, Target.REMOTE, RetryCause.RETARGETED)]
    assert bench.feed(Claim(R, 2, OTHER)) == [Grant(R, 2, OTHER, bench.leases[0])]


def test_a_writer_that_said_it_is_done_may_not_claim_again() -> None:
    bench = in_state(State.FILLING)
    bench.feed(WriterTerminal(R, 1, P))
    assert refusal(bench.feed(Claim(R, 1, P))) is WrongAttempt


def test_parts_that_come_after_their_writer_said_it_is_done_still_land() -> None:
    bench = in_state(State.FILLING)
    bench.feed(WriterTerminal(R, 1, P))
    assert bench.feed(Part(R, 1, P, 0, last=True)) == [Land(R, 1, bench.leases[0], ())]


@pytest.mark.parametrize("proof", [WriterProvenDead(P), WriterReplaced(LATER)])
def test_a_writer_proven_dead_while_it_fills_leaves_its_blocks_to_attempt_two(proof: Event) -> None:
    bench = in_state(State.FILLING)
    assert bench.feed(proof) == [NewTarget(R, 2, Target.REMOTE, RetryCause.WRITER_DEAD)]
    assert bench.feed(Claim(R, 2, LATER)) == [Grant(R, 2, LATER, bench.leases[0])]
    assert bench.all.quarantined_attempts == 0


# LOCAL, LANDED, RUNNING


def test_a_local_request_runs_once_its_prompt_is_computed() -> None:
    bench = in_state(State.LOCAL)
    assert bench.feed(PromptComputed(R)) == []
    assert bench.state() is State.RUNNING


def test_a_repeated_retarget_to_local_gets_the_same_answer() -> None:
    bench = in_state(State.LOCAL)
    assert bench.feed(Retarget(R, 1, Target.LOCAL)) == [NewTarget(R, 1, Target.LOCAL, RetryCause.RETARGETED)]
    assert bench.all.ignored == {Ignored.REPEATED: 1}


@pytest.mark.parametrize("state", [State.LANDED, State.RUNNING])
def test_a_retarget_of_a_landed_request_is_answered_already_landed(state: State) -> None:
    bench = in_state(state)
    assert refusal(bench.feed(Retarget(R, 1))) is AlreadyLanded
    assert bench.state() is state


@pytest.mark.parametrize("state", [State.LANDED, State.RUNNING])
def test_a_late_claim_of_a_landed_request_is_not_granted(state: State) -> None:
    bench = in_state(state)
    assert refusal(bench.feed(Claim(R, 1, P))) is AlreadyLanded


def test_a_landed_request_runs_in_the_next_step() -> None:
    bench = in_state(State.LANDED)
    assert bench.feed(StepTaken(R)) == []
    assert bench.state() is State.RUNNING


@pytest.mark.parametrize("state", [State.LANDED, State.RUNNING])
def test_a_preempted_request_is_computed_again_locally(state: State) -> None:
    bench = in_state(state)
    assert bench.feed(Preempted(R)) == []
    assert bench.state() is State.LOCAL
    assert bench.feed(PromptComputed(R)) == []
    assert bench.state() is State.RUNNING


@pytest.mark.parametrize("state", [State.LANDED, State.RUNNING])
def test_a_preempted_request_that_had_landed_has_landed_still(state: State) -> None:
    bench = in_state(state)
    bench.feed(Preempted(R))
    for to in Target:
        assert refusal(bench.feed(Retarget(R, 1, to))) is AlreadyLanded
    assert refusal(bench.feed(Claim(R, 1, P))) is AlreadyLanded
    assert bench.state() is State.LOCAL


@pytest.mark.parametrize("state", [State.LOCAL, State.LANDED, State.RUNNING])
@pytest.mark.parametrize(
    ("event", "cause"),
    [(Finished(R), EndCause.FINISHED), (NonFinite(R), EndCause.NON_FINITE)]
    + [(Cancel(R, cause), cause) for cause in GIVEN_UP],
)
def test_a_request_that_the_engine_holds_ends_and_leaves_its_blocks_to_the_engine(
    state: State, event: Event, cause: EndCause
) -> None:
    bench = in_state(state)
    assert bench.feed(event) == [End(R, cause, engine_holds=True)]
    assert bench.state() is State.ENDED
    assert not bench.leases[0].released, "the engine frees them when its steps in flight have retired"
    assert bench.all.ended == {cause: 1}


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (EndCause.CANCELLED, RequestCancelled),
        (EndCause.STREAM_LOST, RequestCancelled),
        (EndCause.DEADLINE, DeadlineExceeded),
        (EndCause.NON_FINITE, NumericalError),
        (EndCause.NO_BLOCKS, Overloaded),
    ],
)
def test_every_end_but_a_finish_has_its_error(cause: EndCause, error: type[PacelineError]) -> None:
    assert type(End(R, cause, engine_holds=False).error) is error
    assert End(R, EndCause.FINISHED, engine_holds=True).error is None


# any state


@pytest.mark.parametrize("state", [State.RESERVED, State.FILLING, State.LANDED, State.RUNNING])
@pytest.mark.parametrize("attempt", [0, 2])
def test_a_wrong_attempt_changes_nothing_and_is_counted(state: State, attempt: int) -> None:
    bench = in_state(state)
    before = bench.all.get(R)
    assert bench.feed(Part(R, attempt, P, 5), WriteFailed(R, attempt, P), WriterTerminal(R, attempt, P)) == []
    assert refusal(bench.feed(Claim(R, attempt, P))) is WrongAttempt
    assert bench.all.get(R) == before
    assert bench.all.ignored == {Ignored.WRONG_ATTEMPT: 4}


def test_a_retarget_of_an_attempt_that_is_not_the_current_one_is_refused() -> None:
    bench = in_state(State.FILLING)
    assert refusal(bench.feed(Retarget(R, 2))) is WrongAttempt
    bench.feed(Retarget(R, 1), Claim(R, 2, OTHER))
    assert refusal(bench.feed(Retarget(R, 1))) is WrongAttempt
    assert bench.state() is State.FILLING


@pytest.mark.parametrize(
    ("writer", "reason"),
    [(LATER, Ignored.STALE_EPOCH), (WorkerKey("p", 2), Ignored.STALE_EPOCH), (OTHER, Ignored.WRONG_WRITER)],
)
def test_a_wrong_writer_or_epoch_changes_nothing_and_is_counted(writer: WorkerKey, reason: Ignored) -> None:
    bench = in_state(State.FILLING)
    before = bench.all.get(R)
    assert bench.feed(Part(R, 1, writer, 0, last=True), WriteFailed(R, 1, writer), WriterTerminal(R, 1, writer)) == []
    assert bench.all.get(R) == before
    assert bench.all.ignored == {reason: 3}


def test_a_double_part_changes_nothing_not_even_the_timer() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Part(R, 1, P, 0))
    deadline = bench.all.next_deadline()
    bench.now += 1
    assert bench.feed(Part(R, 1, P, 0)) == []
    assert bench.all.next_deadline() == deadline
    assert bench.all.ignored == {Ignored.DOUBLE_PART: 1}


@pytest.mark.parametrize("state", [State.LANDED, State.RUNNING])
def test_a_double_part_after_landing_is_counted(state: State) -> None:
    bench = in_state(state)
    assert bench.feed(Part(R, 1, P, 0, last=True, first_tokens=(9,))) == []
    assert bench.all.ignored == {Ignored.DOUBLE_PART: 1}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Part(R, 1, P, 1, last=True), Part(R, 1, P, 2)),
        (Part(R, 1, P, 1, last=True), Part(R, 1, P, 0, last=True)),
        (Part(R, 1, P, 2), Part(R, 1, P, 1, last=True)),
        (Part(R, 1, P, 2), Part(R, 1, P, -1)),
    ],
)
def test_a_part_that_contradicts_an_earlier_one_changes_nothing(first: Part, second: Part) -> None:
    bench = in_state(State.FILLING)
    bench.feed(first)
    before = bench.all.get(R)
    assert bench.feed(second) == []
    assert bench.all.get(R) == before
    assert bench.all.ignored == {Ignored.CONTRADICTORY_PART: 1}


def test_calls_for_an_unknown_or_ended_reservation_are_refused_and_the_rest_is_counted() -> None:
    bench = in_state(State.RESERVED)
    bench.feed(Cancel(R))
    assert refusal(bench.feed(Claim(R, 1, P))) is UnknownReservation
    assert refusal(bench.feed(Retarget(R, 1))) is UnknownReservation
    assert bench.feed(Part(R, 1, P, 0), Cancel(R), Finished(R), WriterTerminal(R, 1, P)) == []
    assert bench.all.ignored == {Ignored.UNKNOWN_RESERVATION: 6}


@pytest.mark.parametrize("proof", [WriterProvenDead(P), WriterReplaced(LATER)])
def test_a_claim_by_a_life_that_is_proven_over_is_refused_as_stale(proof: Event) -> None:
    bench = in_state(State.RESERVED)
    bench.feed(proof)
    assert refusal(bench.feed(Claim(R, 1, P))) is StaleEpoch
    assert bench.state() is State.RESERVED
    assert bench.feed(Claim(R, 1, LATER)) == [Grant(R, 1, LATER, bench.leases[0])]


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.RESERVED, PromptComputed(R)),
        (State.FILLING, Finished(R)),
        (State.FILLING, Preempted(R)),
        (State.LOCAL, StepTaken(R)),
        (State.RUNNING, PromptComputed(R)),
    ],
)
def test_an_engine_event_without_a_row_changes_nothing_and_is_counted(state: State, event: Event) -> None:
    bench = in_state(state)
    before = bench.all.get(R)
    assert bench.feed(event) == []
    assert bench.all.get(R) == before
    assert bench.all.ignored == {Ignored.WRONG_STATE: 1}


# quarantine


@pytest.mark.parametrize("proof", [WriterTerminal(R, 1, P), WriterProvenDead(P), WriterReplaced(LATER)])
def test_blocks_leave_quarantine_when_their_writer_is_terminal_or_proven_dead(proof: Event) -> None:
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R))
    assert bench.feed(proof) == []
    assert bench.leases[0].released
    assert (bench.all.quarantined_blocks, bench.all.next_deadline()) == (0, None)
    bench.feed(proof)


@pytest.mark.parametrize(
    "report",
    [
        WriterTerminal(R, 2, P),
        WriterTerminal(ReservationId("s"), 1, P),
        WriterTerminal(R, 1, LATER),
        WriterTerminal(R, 1, OTHER),
        WriterProvenDead(LATER),
        WriterProvenDead(WorkerKey("p", 2)),
        WriterProvenDead(OTHER),
        WriterReplaced(P),
        WriterReplaced(WorkerKey("other", 9)),
    ],
)
def test_a_report_about_any_other_attempt_or_life_frees_nothing(report: Event) -> None:
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R), report)
    assert not bench.leases[0].released
    assert bench.all.quarantined_blocks == 4


def test_time_frees_nothing_but_asks_the_writer_again_and_alarms_once_after_thirty_seconds() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R))
    alarms: list[tuple[float, Alarm]] = []
    started = bench.now
    for _ in range(100):
        due = bench.all.next_deadline()
        assert due is not None
        actions = bench.wait(due - bench.now)
        assert AbortWriter(R, 1, P) in actions
        alarms += [(bench.now - started, action) for action in actions if isinstance(action, Alarm)]
    assert alarms == [(30.0, Alarm(R, 1, P, 4, 30.0))]
    assert not bench.leases[0].released


def test_a_loop_that_wakes_late_still_alarms_at_its_first_chance() -> None:
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R))
    bench.wait(29.0)
    assert bench.all.next_deadline() == bench.now + 1.0
    assert any(isinstance(action, Alarm) for action in bench.wait(1.0))


def test_more_than_a_twentieth_of_the_pool_stuck_in_quarantine_asks_once_for_a_restart() -> None:
    bench = Bench(size=10)
    asked: list[Action[Lease]] = []
    for number in range(4):
        name = ReservationId(f"r{number}")
        bench.all.create(name, bench.lease(), bench.now)
        bench.feed(Claim(name, 1, P), Cancel(name))
        asked += [action for action in bench.wait(30.0) if isinstance(action, DrainAndRestart)]
        assert len(asked) == (number > 0), "10 of 200 blocks is not over the limit"
    assert asked == [DrainAndRestart(20, POOL_BLOCKS)]


def test_a_pool_full_of_cancelled_hand_offs_whose_writers_answer_asks_for_no_restart() -> None:
    bench = Bench(size=10)
    for number in range(POOL_BLOCKS // 10):
        name = ReservationId(f"r{number}")
        bench.all.create(name, bench.lease(), bench.now)
        actions = bench.feed(Claim(name, 1, P), Cancel(name))
        assert not any(isinstance(action, DrainAndRestart) for action in actions)
    assert bench.all.quarantined_blocks == POOL_BLOCKS
    assert not any(isinstance(action, DrainAndRestart) for action in bench.wait(29.0))
    for number in range(POOL_BLOCKS // 10):
        bench.feed(WriterTerminal(ReservationId(f"r{number}"), 1, P))
    assert bench.wait(60.0) == []
    assert bench.all.quarantined_blocks == 0


@pytest.mark.parametrize("state", [state for state in State if state is not State.ENDED])
def test_an_end_is_counted_by_its_cause_and_the_state_that_it_found(state: State) -> None:
    bench = in_state(state)
    bench.feed(Cancel(R, EndCause.STREAM_LOST))
    assert bench.all.ended_in == {(state, EndCause.STREAM_LOST): 1}


def test_a_given_up_writer_is_awaited_until_it_has_ended() -> None:
    """Its write may need the target's own progress to become terminal: a target that slept would wait for ever."""
    bench = in_state(State.FILLING)
    bench.feed(Cancel(R))
    assert bench.all.outstanding
    bench.feed(WriterTerminal(R, 1, P))
    assert not bench.all.outstanding
