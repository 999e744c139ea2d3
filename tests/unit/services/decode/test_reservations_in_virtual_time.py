"""Reservations against a network that loses, delays, doubles and re-orders, and writers that write whenever they can.

The writers are adversaries: a grant, once issued, lets them write to its blocks at any later moment, until they have
written every part, have said that they are terminal, or are dead. The model knows the truth; the reservations see only
events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.services.decode.reservation_actions import (
    AbortWriter,
    Action,
    Alarm,
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
    StepTaken,
    Target,
    WriteFailed,
    WriterProvenDead,
    WriterReplaced,
    WriterTerminal,
)
from paceline.services.decode.reservation_states import CLAIM_S, SILENCE_S, State
from paceline.services.decode.reservations import Reservations
from paceline.types import ReservationId, WorkerKey

POOL_BLOCKS = 16
MAX_LIVE = 3
WORKER_IDS = ("p0", "p1")
PICK = st.integers(0, 1_000_000)  # taken modulo the number of choices

Job: TypeAlias = tuple[ReservationId, int]


class Pool:
    """Who owns each block."""

    def __init__(self) -> None:
        self.owner: dict[int, Lease] = {}

    def lease(self, size: int) -> Lease | None:
        free = [block for block in range(POOL_BLOCKS) if block not in self.owner]
        if len(free) < size:
            return None
        lease = Lease(self, free[:size])
        self.owner.update(dict.fromkeys(lease.blocks, lease))
        return lease


class Lease:
    """A handle that raises when it is released twice."""

    def __init__(self, pool: Pool, blocks: list[int]) -> None:
        self.pool = pool
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def held(self) -> bool:
        return all(self.pool.owner.get(block) is self for block in self.blocks)

    def release(self) -> None:
        assert self.held, "released twice"
        for block in self.blocks:
            del self.pool.owner[block]


@dataclass
class Writes:
    """What one writer does, or might still do, for one attempt."""

    total: int
    grant: Lease | None = None  # issued by D, whether or not the answer has arrived
    answered: bool = False
    written: set[int] = field(default_factory=set)
    aborted: bool = False
    terminal: bool = False


@dataclass
class Writer:
    key: WorkerKey
    alive: bool = True
    jobs: dict[Job, Writes] = field(default_factory=dict)

    def can_still_write(self, job: Writes) -> bool:
        return self.alive and job.grant is not None and not job.terminal and len(job.written) < job.total


class VirtualTime(RuleBasedStateMachine):
    """The router, the network, the writers and the engine; a rule is one thing that one of them does."""

    @initialize()
    def start(self) -> None:
        self.pool = Pool()
        self.sizes: dict[ReservationId, int] = {}
        self.all: Reservations[Lease] = Reservations(
            pool_blocks=POOL_BLOCKS, allocate=lambda name: self.pool.lease(self.sizes[name])
        )
        self.now = 0.0
        self.to_d: list[Event] = []
        self.to_writers: list[Grant[Lease] | AbortWriter] = []
        self.writers = {WorkerKey(name, 1): Writer(WorkerKey(name, 1)) for name in WORKER_IDS}
        self.engine: dict[ReservationId, Lease | None] = {}
        self.ended: Counter[ReservationId] = Counter()
        self.alarms: Counter[tuple[ReservationId, int]] = Counter()

    # D

    def feed(self, event: Event) -> None:
        names = [] if isinstance(event, WriterProvenDead | WriterReplaced) else [event.reservation]
        before = [(self.all.get(name), self.all.quarantined_attempts) for name in names]
        ignored = self.all.ignored.total()
        actions = self.all.handle(event, self.now)
        answers = sum(isinstance(action, Grant | NewTarget | Refuse) for action in actions)
        if isinstance(event, Claim | Retarget):
            assert answers == 1, "a call gets exactly one answer"
        after = [(self.all.get(name), self.all.quarantined_attempts) for name in names]
        assert self.all.ignored.total() - ignored == (before == after and bool(names)), (
            "what changes nothing is counted"
        )
        self.carry_out(actions)

    def carry_out(self, actions: list[Action[Lease]]) -> None:
        for action in actions:
            match action:
                case Grant(blocks=blocks):
                    assert blocks.held
                    job = self.writers[action.writer].jobs.setdefault((action.reservation, action.attempt), Writes(1))
                    assert job.grant in (None, blocks)
                    assert not any(
                        other.grant is blocks and writer.can_still_write(other)
                        for writer in self.writers.values()
                        for other in writer.jobs.values()
                        if other is not job
                    ), "two may write to the same blocks"
                    job.grant = blocks
                    self.to_writers.append(action)
                case AbortWriter():
                    self.to_writers.append(action)
                case Land(blocks=blocks) | StartLocalPrefill(blocks=blocks):
                    assert blocks.held
                    assert action.reservation not in self.engine
                    self.engine[action.reservation] = blocks
                case End(reservation=name):
                    self.ended[name] += 1
                    assert action.engine_holds == (name in self.engine)
                    if (lease := self.engine.pop(name, None)) is not None:
                        lease.release()
                case Alarm():
                    self.alarms[action.reservation, action.attempt] += 1

    # The router

    @precondition(lambda self: len(self.all) < MAX_LIVE)
    @rule(size=st.integers(1, 4), local=st.booleans())
    def generate(self, size: int, local: bool) -> None:
        name = ReservationId(f"r{len(self.sizes)}")
        lease = self.pool.lease(size)
        if lease is None:
            return
        self.sizes[name] = size
        if local and size == 4:
            self.carry_out(self.all.create_local(name, lease))
        else:
            self.all.create(name, lease, self.now)

    @precondition(lambda self: self.sizes)
    @rule(pick=PICK, attempt=st.integers(1, 3), to=st.sampled_from(Target))
    def retarget(self, pick: int, attempt: int, to: Target) -> None:
        self.to_d.append(Retarget(self.name(pick), attempt, to))

    @precondition(lambda self: self.sizes)
    @rule(pick=PICK, cause=st.sampled_from([EndCause.CANCELLED, EndCause.STREAM_LOST, EndCause.DEADLINE]))
    def cancel(self, pick: int, cause: EndCause) -> None:
        self.to_d.append(Cancel(self.name(pick), cause))

    def name(self, pick: int) -> ReservationId:
        """Mostly one that lives."""
        live = [name for name in self.sizes if name in self.all]
        names = live if live and pick % 8 else list(self.sizes)
        return names[pick % len(names)]

    # The network

    @precondition(lambda self: self.to_d)
    @rule(pick=PICK, doubled=st.booleans())
    def deliver_to_d(self, pick: int, doubled: bool) -> None:
        index = -1 if pick % 2 else pick % len(self.to_d)  # the newest as often as any other
        event = self.to_d[index] if doubled else self.to_d.pop(index)
        self.feed(event)

    @precondition(lambda self: self.to_d)
    @rule(pick=PICK)
    def lose_on_the_way_to_d(self, pick: int) -> None:
        event = self.to_d[pick % len(self.to_d)]
        if not isinstance(event, WriterProvenDead | WriterReplaced):  # the registry repeats those until they arrive
            self.to_d.remove(event)

    @precondition(lambda self: self.to_writers)
    @rule(pick=PICK, doubled=st.booleans(), lost=st.booleans())
    def deliver_to_a_writer(self, pick: int, doubled: bool, lost: bool) -> None:
        index = pick % len(self.to_writers)
        message = self.to_writers[index] if doubled else self.to_writers.pop(index)
        if not lost:
            self.receive(message)

    # The writers

    def receive(self, message: Grant[Lease] | AbortWriter) -> None:
        writer = self.writers[message.writer]
        job = writer.jobs.setdefault((message.reservation, message.attempt), Writes(1))
        if isinstance(message, Grant):
            job.answered = True
        elif writer.alive:
            job.aborted = True
            if job.terminal:
                self.to_d.append(WriterTerminal(message.reservation, message.attempt, writer.key))

    def pick_writer(self, pick: int) -> Writer:
        living = [writer for writer in self.writers.values() if writer.alive]
        return living[pick % len(living)]

    def pick_job(self, pick: int) -> tuple[Writer, Job, Writes] | None:
        """Mostly one that can still write."""
        jobs = [(w, name, job) for w in self.writers.values() for name, job in w.jobs.items() if w.alive]
        writing = [(w, name, job) for w, name, job in jobs if w.can_still_write(job)]
        jobs = writing if writing and pick % 8 else jobs
        return jobs[pick % len(jobs)] if jobs else None

    @precondition(lambda self: self.sizes)
    @rule(
        pick=PICK,
        who=PICK,
        attempt=st.integers(1, 2),
        total=st.integers(1, 3),
        at_once=st.booleans(),
        answered=st.booleans(),
    )
    def claim(self, pick: int, who: int, attempt: int, total: int, at_once: bool, answered: bool) -> None:
        writer, name = self.pick_writer(who), self.name(pick)
        record = self.all.get(name)
        if at_once and record is not None:
            attempt = record.attempt
        job = writer.jobs.setdefault((name, attempt), Writes(total))
        claim = Claim(name, attempt, writer.key)
        self.to_d.append(claim)
        if at_once:
            self.feed(claim)
            job.answered = job.answered or (answered and job.grant is not None)

    @rule(pick=PICK, which=st.integers(0, 2), notified=st.booleans())
    def write(self, pick: int, which: int, notified: bool) -> None:
        """A write lands, to any of the blocks that were granted; its notification is under way, or has arrived."""
        chosen = self.pick_job(pick)
        if chosen is None:
            return
        writer, (name, attempt), job = chosen
        if job.answered and writer.can_still_write(job):
            assert job.grant is not None
            left = sorted(set(range(job.total)) - job.written)
            part = left[which % len(left)]
            assert job.grant.held, "a writer wrote to blocks that were free, or another's"
            job.written.add(part)
            last = part == job.total - 1
            event = Part(name, attempt, writer.key, part, last, (7,) if last else ())
            self.to_d.append(event)
            if notified:
                self.feed(event)

    @rule(pick=PICK)
    def fail_a_write(self, pick: int) -> None:
        if (chosen := self.pick_job(pick)) is not None:
            writer, (name, attempt), _ = chosen
            self.to_d.append(WriteFailed(name, attempt, writer.key))

    @rule(pick=PICK, unasked=st.booleans())
    def become_terminal(self, pick: int, unasked: bool) -> None:
        if (chosen := self.pick_job(pick)) is not None:
            writer, (name, attempt), job = chosen
            if job.aborted or unasked:
                job.terminal = True
                self.to_d.append(WriterTerminal(name, attempt, writer.key))

    @rule(pick=PICK, proof=st.booleans(), restarts=st.booleans(), at_once=st.booleans())
    def die(self, pick: int, proof: bool, restarts: bool, at_once: bool) -> None:
        writer = self.pick_writer(pick)
        successor = WorkerKey(writer.key.worker_id, writer.key.epoch + 1)
        writer.alive = False
        self.writers[successor] = Writer(successor)
        if proof:
            self.to_d.append(WriterProvenDead(writer.key))
        if restarts or not proof:
            self.to_d.append(WriterReplaced(successor))
        if at_once:
            self.feed(self.to_d[-1])

    # The engine

    @precondition(lambda self: self.engine)
    @rule(pick=PICK, kind=st.sampled_from([PromptComputed, StepTaken, Preempted, Finished, NonFinite]))
    def engine_moves(
        self, pick: int, kind: type[PromptComputed | StepTaken | Preempted | Finished | NonFinite]
    ) -> None:
        name = list(self.engine)[pick % len(self.engine)]
        lease = self.engine[name]
        if kind is Preempted and lease is not None:
            lease.release()
            self.engine[name] = None
        self.feed(kind(name))

    # Time

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.all.expire(self.now))

    # What holds at every moment

    @invariant()
    def blocks_that_someone_may_write_to_are_kept_from_everyone_else(self) -> None:
        for writer in self.writers.values():
            for name, job in writer.jobs.items():
                if writer.can_still_write(job):
                    assert job.grant is not None
                    assert job.grant.held, f"{writer.key} may still write for {name}, and its blocks are not kept"

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        live = [self.all.get(name) for name in self.sizes]
        waiting = sum(len(r.blocks) for r in live if r is not None and r.blocks is not None)
        engine = sum(len(lease) for lease in self.engine.values() if lease is not None)
        assert len(self.pool.owner) == waiting + engine + self.all.quarantined_blocks

    @invariant()
    def nothing_waits_without_a_timer_or_the_engine(self) -> None:
        for name in self.sizes:
            record = self.all.get(name)
            if record is None:
                continue
            assert (record.state in (State.RESERVED, State.FILLING)) == (record.deadline is not None)
            assert (record.deadline is None) == (name in self.engine)
            if record.deadline is not None:
                next_deadline = self.all.next_deadline()
                assert next_deadline is not None
                assert next_deadline <= record.deadline <= self.now + max(CLAIM_S, SILENCE_S)

    @invariant()
    def every_reservation_ends_once_and_the_counters_add_up(self) -> None:
        assert self.all.created == len(self.sizes) == len(self.all) + self.all.ended.total()
        states = [record.state for name in self.sizes if (record := self.all.get(name)) is not None]
        assert [self.all.count(state) for state in State] == [states.count(state) for state in State]
        assert all(self.ended[name] == (name not in self.all) for name in self.sizes)
        assert all(count == 1 for count in self.alarms.values())

    # The end: every message is lost, and the timers and the survivors do the rest.

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        proofs = [event for event in self.to_d if isinstance(event, WriterProvenDead | WriterReplaced)]
        self.to_d.clear()
        self.to_writers.clear()
        for event in proofs:
            self.feed(event)
        limit = self.now + 300.0
        while (deadline := self.all.next_deadline()) is not None or self.engine:
            for name in list(self.engine):
                self.feed(Finished(name))
            if deadline is not None:
                assert deadline <= self.now + 10.0
                self.now = max(self.now, deadline)
                self.carry_out(self.all.expire(self.now))
            self.survivors_obey()
            assert self.now < limit, "some of it goes on for ever"
        assert len(self.all) == 0
        assert self.all.quarantined_blocks == 0
        assert not self.pool.owner, "every block is back"
        self.every_reservation_ends_once_and_the_counters_add_up()

    def survivors_obey(self) -> None:
        for message in self.to_writers:
            if isinstance(message, AbortWriter) and (writer := self.writers[message.writer]).alive:
                writer.jobs[message.reservation, message.attempt].terminal = True
                self.feed(WriterTerminal(message.reservation, message.attempt, message.writer))
        self.to_writers.clear()


TestVirtualTime = VirtualTime.TestCase
TestVirtualTime.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
