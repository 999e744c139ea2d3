"""When requests are sent in an open loop. Pure: equal arguments give equal moments, in every process."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paceline.loadtest.trace import Entry


def poisson(rate: float, *, seed: int, count: int | None = None, duration_s: float | None = None) -> Iterator[float]:
    """Moments of a Poisson process of `rate` a second, in seconds from its start, the first after the first gap.

    They end after `count`, or before the first one past `duration_s`, whichever is sooner; one of the two is needed.
    """
    assert count is not None or duration_s is not None
    draw = random.Random(f"arrivals {seed}")
    moment = 0.0
    sent = 0
    while count is None or sent < count:
        moment += draw.expovariate(rate)
        if duration_s is not None and moment > duration_s:
            return
        yield moment
        sent += 1


def replayed(
    entries: list[Entry], *, speed: float, count: int | None = None, duration_s: float | None = None
) -> Iterator[tuple[float, Entry]]:
    """Moment and lengths of a trace's requests, `speed` times faster, cut as `poisson` is."""
    for entry in entries[:count]:
        moment = entry.at_s / speed
        if duration_s is not None and moment > duration_s:
            return
        yield moment, entry
