"""Decides when an engine that gives no sign of life is lost: pure, told of the time and of what was heard.

Two things look like a standstill and are none. A step may be long, a prompt's layer on a CPU above all: an engine that
uses a CPU gets more time. And whoever listens may have stood still itself, as when a container is paused: of such a
pause no more counts than the time between two looks.
"""

from __future__ import annotations

from typing import Final

BUSY_FACTOR: Final = 6.0
"""How many times the limit a silent engine gets while it uses a CPU."""
_IDLE_SHARE: Final = 0.01
"""A process that uses up to so much of a CPU computes nothing."""


class Watchdog:
    """`silent_s >= idle_s`: time without a sign of life, and of it the time without use of a CPU, in seconds."""

    def __init__(self, limit_s: float, *, interval_s: float) -> None:
        """Looks are `interval_s` apart."""
        self._limit_s = limit_s
        self._longest_s = 2 * interval_s
        self.silent_s = 0.0
        self.idle_s = 0.0

    def look(self, *, elapsed_s: float, spoke: bool, cpu_s: float | None) -> bool:
        """True where the engine is lost.

        `cpu_s`: the CPU time that it used in the `elapsed_s` since the last look; None where that is not known.
        """
        if spoke:
            self.silent_s = self.idle_s = 0.0
            return False
        counted = min(elapsed_s, self._longest_s)
        self.silent_s += counted
        if cpu_s is not None and cpu_s <= _IDLE_SHARE * elapsed_s:
            self.idle_s += counted
        return self.idle_s >= self._limit_s or self.silent_s >= BUSY_FACTOR * self._limit_s
