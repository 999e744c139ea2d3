"""Timers by key, told the time by their caller."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """At most one timer a key. Setting and cancelling cost O(log n); times are monotonic seconds.

    A moved or cancelled timer leaves its old entry in the heap, which is dropped when its time would have come.
    """

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()  # so that keys need no order of their own

    def set(self, key: K, when: float) -> None:
        """Sets or moves the key's timer."""
        if self._when.get(key) != when:
            self._when[key] = when
            heapq.heappush(self._heap, (when, next(self._order), key))

    def cancel(self, key: K) -> None:
        """Removes the key's timer, if it has one."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the earliest timer is due; None where none is set."""
        while self._heap:
            when, _, key = self._heap[0]
            if self._when.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Removes the timers that are due at `now` and returns their keys, earliest first."""
        due: list[K] = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            due.append(key)
        return due
