"""When a dead role is started again, and when to give up: pure, time comes in as a number.

A role's first restart waits 0.2 s, each further one twice as long, up to 5 s; a role that has lived for a whole window
starts over. The fifth death of one role within a window ends everything: whatever is wrong will not heal by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

FIRST_DELAY_S: Final = 0.2
LONGEST_DELAY_S: Final = 5.0
STARTUP_STATUS: Final = 2
"""Exit status of a process that could not start and says why (StartupError)."""


class Restart(msgspec.Struct, frozen=True):
    """Start the role again after a wait."""

    delay_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """Stop everything. `cannot_start` where the role never served and said what to change."""

    cannot_start: bool


class RestartPolicy:
    """The deaths of one role, and what follows from each."""

    def __init__(self, *, max_deaths: int = 5, window_s: float = 60.0) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def on_death(self, status: int, *, now: float, has_served: bool) -> Restart | GiveUp:
        """What to do about an exit with `status` at `now` (seconds, monotonic).

        A role that cannot start is not tried again, since it would say the same; once it has served it is, since then
        only its surroundings can have changed.
        """
        if status == STARTUP_STATUS and not has_served:
            return GiveUp(cannot_start=True)
        self._deaths.append(now)
        while self._deaths[0] <= now - self._window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self._max_deaths:
            return GiveUp(cannot_start=False)
        return Restart(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self._deaths) - 1)))
