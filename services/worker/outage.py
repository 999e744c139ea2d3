"""What a worker says of a router that does not take its sign of life, and how often: pure, time comes in as a number.

A router that is away for a moment is ordinary: it starts beside the worker, is started again, or stops a moment before
the worker does. One that stays away is worth a warning, and one that refuses the worker is at once, since that
does not heal by itself; both again and again, for the worker stays up and takes no work. It does not exit: either side
may be the one that is set up wrongly, and its model is loaded.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from paceline.errors import PacelineError, Status

PATIENCE_S: Final = 3.0
"""How long a router may be away before a word is said."""
REPEAT_S: Final = 15.0
"""Between two words of one trouble."""

_AWAY: Final = frozenset({Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.CANCELLED})


class Trouble(enum.Enum):
    """What is wrong between a worker and a router, in a log's words."""

    AWAY = "router not reached"
    REFUSED = "router refuses this worker"
    FORGOTTEN = "router does not know this worker"  # it was started again: the worker registers again


class Outage:
    """The failures since the router last took a sign of life."""

    def __init__(self) -> None:
        self._trouble: Trouble | None = None
        self._since = math.inf
        self._said_at = -math.inf

    def end(self) -> None:
        """The router took a sign of life."""
        self._trouble = None

    def failed(self, error: PacelineError, *, draining: bool, now: float) -> Trouble | None:
        """What is to be said of a failure at `now` (seconds, monotonic), if anything is."""
        trouble = _trouble(error)
        if trouble is not self._trouble:
            self._trouble, self._since, self._said_at = trouble, now, -math.inf
        if trouble is Trouble.AWAY and (draining or now - self._since < PATIENCE_S):
            return None
        if now - self._said_at < REPEAT_S:
            return None
        self._said_at = now
        return trouble


def _trouble(error: PacelineError) -> Trouble:
    if error.status in _AWAY:
        return Trouble.AWAY
    return Trouble.FORGOTTEN if error.status is Status.NOT_FOUND else Trouble.REFUSED
