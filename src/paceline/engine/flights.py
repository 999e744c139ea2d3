"""The steps that the device computes while the host goes on, and the requests whose blocks wait for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.runner import RunningStep


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and whose result nobody has looked at."""

    chunks: Sequence[Chunk]
    step: RunningStep
    launched_at: float

    @property
    def goes_alone(self) -> bool:
        """True where the next step can't be planned before its result: a draw hangs on the tokens before it."""
        return any(chunk.samples and chunk.request.shaping is not None for chunk in self.chunks)


class Flights:
    """Steps in the order of their launches."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._leaving: set[EngineRequest] = set()  # that ended, and whose blocks a step in flight may write to
        self._retired_at = 0.0

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._flights)

    @property
    def first(self) -> Flight:
        """The next to retire. There is one."""
        return self._flights[0]

    @property
    def last(self) -> Flight:
        """The one launched last. There is one."""
        return self._flights[-1]

    def add(self, flight: Flight) -> None:
        """A step was launched behind the others."""
        self._flights.append(flight)

    def wait(self, tick: Callable[[], None]) -> Flight:
        """Takes the first out once it is done, and calls `tick` until then."""
        flight = self._flights.popleft()
        while not flight.step.done:
            tick()
        return flight

    def let_go(self, request: EngineRequest) -> None:
        """Frees an ended request's blocks, now or when no step in flight writes to them.

        A peer's write may come into them next.
        """
        if request.ahead:
            self._leaving.add(request)
        else:
            request.lease.release()

    def retired(self, flight: Flight) -> float:
        """The flight's result was taken in: frees what waited for it. The seconds for which only it was awaited."""
        if self._leaving:
            gone = {chunk.request for chunk in flight.chunks if not chunk.request.ahead} & self._leaving
            self._leaving -= gone
            for request in gone:
                request.lease.release()
        now = time.perf_counter()
        seconds = now - max(flight.launched_at, self._retired_at)
        self._retired_at = now
        return seconds
