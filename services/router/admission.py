"""Who waits for a place, in which order, and for how long.

`Line` is the order itself, pure. `Admission` is the line on an event loop: whatever may make room (a load report, a
worker that registers or expires, a request that ends) calls `wake`, and the head is tried again. Only the head is: a
large request is never overtaken by small ones for ever. A request that its workers refused keeps its ticket, and so
returns to where it stood.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from paceline.errors import Overloaded, PacelineError

P = TypeVar("P")

RETRY_S: Final = 1.0
"""While something waits, the head is tried this often whatever happens: a refusal's rest ends without an event."""
_SHORTEST_RETRY_AFTER_S: Final = 0.5
_LONGEST_RETRY_AFTER_S: Final = 30.0


class Ticket:
    """A request's place: higher priorities first, then by arrival. `patience_s` is the wait that it has left."""

    def __init__(self, number: int, *, priority: int, patience_s: float) -> None:
        self.order = (-priority, number)
        self.patience_s = patience_s

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order


class Line:
    """Tickets in order, at most `size` of them from `enter`. Returning ones are always let in: they had a place."""

    def __init__(self, *, size: int) -> None:
        self._size = size
        self._tickets: list[Ticket] = []
        self._left_at: float | None = None
        self._gap_s = 1.0  # smoothed time between two departures

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def head(self) -> Ticket | None:
        """The ticket whose turn it is."""
        return self._tickets[0] if self._tickets else None

    def enter(self, ticket: Ticket) -> None:
        """Queues a new ticket, or raises Overloaded saying when to come back."""
        if len(self) >= self._size:
            raise Overloaded(
                f"{len(self)} requests wait, and the queue holds {self._size}", retry_after_s=self.retry_after_s
            )
        insort(self._tickets, ticket)

    def re_enter(self, ticket: Ticket) -> None:
        """Queues a ticket where it stood."""
        insort(self._tickets, ticket)

    def leave(self, ticket: Ticket) -> None:
        """Takes a ticket out that gave up."""
        self._tickets.remove(ticket)

    def serve(self, *, now: float) -> Ticket:
        """Takes the head out, for it has a place."""
        if self._left_at is not None:
            self._gap_s += (now - self._left_at - self._gap_s) / 8
        self._left_at = now
        return self._tickets.pop(0)

    @property
    def retry_after_s(self) -> float:
        """When a place in the line is likely, in seconds."""
        return min(max(len(self) * self._gap_s, _SHORTEST_RETRY_AFTER_S), _LONGEST_RETRY_AFTER_S)


class Admission(Generic[P]):
    """The line on an event loop. `P` is a place: whatever the `try_place` of a request returns."""

    def __init__(self, *, size: int, patience_s: float) -> None:
        self._line = Line(size=size)
        self._patience_s = patience_s
        self._numbers = itertools.count()
        self._waiting: dict[Ticket, _Waiter[P]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._line)

    @property
    def retry_after_s(self) -> float:
        """When a place in the line is likely, in seconds."""
        return self._line.retry_after_s

    def ticket(self, *, priority: int) -> Ticket:
        """A new request's place in the order. It waits only once `place` is called."""
        return Ticket(next(self._numbers), priority=priority, patience_s=self._patience_s)

    async def place(
        self,
        ticket: Ticket,
        try_place: Callable[[], P | None],
        *,
        give_back: Callable[[P], None],
        impatient: Callable[[float], PacelineError],
        returning: bool = False,
    ) -> P:
        """Waits for the ticket's turn and its place.

        `try_place` takes a place or returns None; `give_back` returns one that nobody waits for any more. Raises
        Overloaded where the line is full, what `impatient(retry_after_s)` makes where the ticket's patience ends, and
        whatever `try_place` raises.
        """
        loop = asyncio.get_running_loop()
        head = self._line.head
        if head is None or ticket < head:
            at_once = try_place()
            if at_once is not None:
                return at_once
        (self._line.re_enter if returning else self._line.enter)(ticket)
        waiter: _Waiter[P] = _Waiter(try_place, loop.create_future())
        self._waiting[ticket] = waiter
        self._arm()
        since = loop.time()
        try:
            async with asyncio.timeout(ticket.patience_s):
                return await waiter.place
        except TimeoutError:
            self._discard(ticket, waiter, give_back)
            raise impatient(self._line.retry_after_s) from None
        except asyncio.CancelledError:
            self._discard(ticket, waiter, give_back)
            raise
        finally:
            ticket.patience_s = max(0.0, ticket.patience_s - (loop.time() - since))

    def wake(self) -> None:
        """Tries the head, and the next while each finds a place. Call it whenever there may be room."""
        now = asyncio.get_running_loop().time()
        while (head := self._line.head) is not None:
            waiter = self._waiting[head]
            if waiter.place.done():  # cancelled, and its task has not run since
                self._line.leave(head)
                del self._waiting[head]
                continue
            try:
                place = waiter.try_place()
            except PacelineError as error:
                waiter.place.set_exception(error)
            else:
                if place is None:
                    break
                waiter.place.set_result(place)
            del self._waiting[self._line.serve(now=now)]
        self._arm()

    def _discard(self, ticket: Ticket, waiter: _Waiter[P], give_back: Callable[[P], None]) -> None:
        """Undoes a wait that ended without its place being taken."""
        if self._waiting.pop(ticket, None) is not None:
            self._line.leave(ticket)
            self.wake()  # a smaller request behind a large head may fit
        elif waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
            give_back(waiter.place.result())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self.wake)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Waiter(Generic[P]):
    """A queued request's way to its place."""

    def __init__(self, try_place: Callable[[], P | None], place: asyncio.Future[P]) -> None:
        self.try_place = try_place
        self.place = place
