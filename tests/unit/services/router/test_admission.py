"""The queue: its order in virtual time, and its waits on a real loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.errors import ExceedsPool, NoWorker, Overloaded, PacelineError
from paceline.services.router.admission import Admission, Line, Ticket


def ticket(number: int, *, priority: int = 0) -> Ticket:
    return Ticket(number, priority=priority, patience_s=1.0)


@given(priorities=st.lists(st.integers(-2, 2), max_size=30))
def test_higher_priorities_go_first_and_equals_in_the_order_of_arrival(priorities: list[int]) -> None:
    line = Line(size=30)
    for number, priority in enumerate(priorities):
        line.enter(ticket(number, priority=priority))
    served = [line.serve(now=0.0).order for _ in priorities]
    assert served == sorted((-priority, number) for number, priority in enumerate(priorities))


class LineMachine(RuleBasedStateMachine):
    """The line beside a plain sorted list."""

    SIZE = 4

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(size=self.SIZE)
        self.model: list[Ticket] = []
        self.out: list[Ticket] = []
        self.number = 0
        self.now = 0.0

    @rule(priority=st.integers(-1, 1), pause=st.floats(0, 10))
    def enter(self, priority: int, pause: float) -> None:
        self.now += pause
        new = ticket(self.number, priority=priority)
        self.number += 1
        if len(self.model) >= self.SIZE:
            with pytest.raises(Overloaded) as refusal:
                self.line.enter(new)
            assert 0 < refusal.value.retry_after_s <= 30
        else:
            self.line.enter(new)
            self.model = sorted([*self.model, new])

    @precondition(lambda self: self.model)
    @rule()
    def serve(self) -> None:
        served = self.line.serve(now=self.now)
        assert served is self.model.pop(0)
        self.out.append(served)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def re_enter(self, data: st.DataObject) -> None:
        back = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.line.re_enter(back)
        self.model = sorted([*self.model, back])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.line.leave(self.model.pop(data.draw(st.integers(0, len(self.model) - 1))))

    @invariant()
    def agrees(self) -> None:
        assert len(self.line) == len(self.model)
        assert self.line.head is (self.model[0] if self.model else None)


TestLineMachine = LineMachine.TestCase


class Room:
    """Places to give out: as many as `free` says."""

    def __init__(self, free: int, *, size: int = 10, patience_s: float = 10.0) -> None:
        self.free = free
        self.tries = 0
        self.admission: Admission[str] = Admission(size=size, patience_s=patience_s)

    def taking(self, name: str) -> Callable[[], str | None]:
        def try_place() -> str | None:
            self.tries += 1
            if not self.free:
                return None
            self.free -= 1
            return name

        return try_place

    def give_back(self, _place: str) -> None:
        self.free += 1
        self.admission.wake()

    async def place(self, name: str, ticket: Ticket | None = None, *, returning: bool = False) -> str:
        return await self.admission.place(
            ticket or self.admission.ticket(priority=0),
            self.taking(name),
            give_back=self.give_back,
            impatient=_impatient,
            returning=returning,
        )

    def start(self, name: str, ticket: Ticket | None = None, *, returning: bool = False) -> asyncio.Task[str]:
        return asyncio.create_task(self.place(name, ticket, returning=returning))


def _impatient(retry_after_s: float) -> PacelineError:
    assert retry_after_s > 0
    return NoWorker("waited in vain")


async def test_where_there_is_room_nobody_waits() -> None:
    room = Room(1)
    assert await room.place("a") == "a"
    assert len(room.admission) == 0


async def test_room_goes_to_the_head_and_nothing_is_tried_in_between() -> None:
    room = Room(0)
    tasks = [room.start(name) for name in "abc"]
    await asyncio.sleep(0)
    tried = room.tries
    await asyncio.sleep(0.05)
    assert (room.tries, len(room.admission)) == (tried, 3)  # no busy polling
    room.free = 2
    room.admission.wake()
    assert [await task for task in tasks[:2]] == ["a", "b"]
    assert len(room.admission) == 1
    room.give_back("a")
    assert await tasks[2] == "c"


async def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    room = Room(0)
    large = room.start("large")
    await asyncio.sleep(0)
    small_tries = []

    def small_fits() -> str | None:
        small_tries.append(1)
        return "small"

    admission = room.admission
    small = asyncio.create_task(
        admission.place(admission.ticket(priority=0), small_fits, give_back=room.give_back, impatient=_impatient)
    )
    await asyncio.sleep(0)
    admission.wake()
    assert not small.done() and not small_tries
    large.cancel()
    assert await small == "small"
    await asyncio.gather(large, return_exceptions=True)


async def test_a_returning_ticket_stands_where_it_stood() -> None:
    room = Room(1)
    first = room.admission.ticket(priority=0)
    assert await room.place("first", first) == "first"
    second = room.start("second")
    await asyncio.sleep(0)
    again = room.start("first", first, returning=True)
    await asyncio.sleep(0)
    room.give_back("first")
    assert await again == "first"
    assert not second.done()
    room.give_back("first")
    assert await second == "second"


async def test_a_returning_ticket_is_let_into_a_full_line() -> None:
    room = Room(0, size=1)
    waiting = room.start("a")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await room.place("b")
    returning = room.start("c", room.admission.ticket(priority=0), returning=True)
    await asyncio.sleep(0)
    assert len(room.admission) == 2
    room.free = 2
    room.admission.wake()
    assert [await waiting, await returning] == ["a", "c"]


async def test_patience_is_counted_over_all_of_a_tickets_waits() -> None:
    room = Room(0, patience_s=0.15)
    mine = room.admission.ticket(priority=0)
    wait = room.start("a", mine)
    await asyncio.sleep(0.1)
    room.give_back("")
    assert await wait == "a"
    assert mine.patience_s < 0.1
    with pytest.raises(NoWorker):
        await room.place("a", mine, returning=True)
    assert len(room.admission) == 0


async def test_a_place_whose_taker_is_gone_goes_to_the_next() -> None:
    room = Room(0)
    first, second = room.start("a"), room.start("b")
    await asyncio.sleep(0)
    room.free = 1
    room.admission.wake()  # the place is the first's, which has not run since
    first.cancel()
    assert await second == "b"
    assert room.free == 0
    await asyncio.gather(first, return_exceptions=True)


async def test_a_waiter_cancelled_in_the_same_turn_gets_no_place() -> None:
    room = Room(0)
    first, second = room.start("a"), room.start("b")
    await asyncio.sleep(0)
    first.cancel()
    room.free = 1
    room.admission.wake()
    assert await second == "b"
    assert room.free == 0
    await asyncio.gather(first, return_exceptions=True)


async def test_an_error_of_placing_is_the_waiters() -> None:
    room = Room(0)
    found: list[str] = []

    def try_place() -> str | None:
        if not found:
            return None
        raise ExceedsPool("prompt", "is too large for the pool now")

    admission = room.admission
    doomed = asyncio.create_task(
        admission.place(admission.ticket(priority=0), try_place, give_back=room.give_back, impatient=_impatient)
    )
    behind = room.start("b")
    await asyncio.sleep(0)
    found.append("now")
    room.free = 1
    admission.wake()
    with pytest.raises(ExceedsPool):
        await doomed
    assert await behind == "b"


async def test_while_something_waits_the_head_is_tried_again_by_and_by() -> None:
    room = Room(0)
    waiting = room.start("a")
    await asyncio.sleep(0)
    room.free = 1  # and nobody calls wake
    async with asyncio.timeout(10):
        assert await waiting == "a"
    room.admission.close()
