"""Tells whether a server falls behind an open loop. Pure.

Answers come as fast as requests do where a server keeps up, at any latency; where it does not, the number under way
grows. Both are looked at after the first third of the sending, when the ramp up is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.loadtest.outcome import Outcome

KEPT_UP: Final = 0.95
"""Least share of the offered rate that is answered by a server that keeps up."""
_SIGMAS: Final = 3.0
"""The number under way varies by chance. With Poisson arrivals its variance is about its mean, and that of the growth
between two moments their sum; a growth within so many deviations says nothing."""
_RAMP: Final = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """How a server fell behind after the first third of the sending."""

    offered_per_s: float
    answered_per_s: float
    under_way_before: int
    under_way_after: int


def backlog(outcomes: Sequence[Outcome]) -> Backlog | None:
    """None where the server kept up with arrivals at a constant rate, or where the run is too short to tell."""
    first, end = min(outcome.sent_s for outcome in outcomes), max(outcome.sent_s for outcome in outcomes)
    begin = first + _RAMP * (end - first)
    offered = sum(begin < outcome.sent_s <= end for outcome in outcomes)
    answered = sum(outcome.error is None and begin < outcome.ended_s <= end for outcome in outcomes)
    before, after = (_under_way(outcomes, moment) for moment in (begin, end))
    began_to_answer = any(outcome.ended_s <= begin for outcome in outcomes)
    if not began_to_answer or answered >= KEPT_UP * offered or after - before <= _SIGMAS * math.sqrt(before + after):
        return None
    seconds = end - begin
    return Backlog(
        offered_per_s=offered / seconds,
        answered_per_s=answered / seconds,
        under_way_before=before,
        under_way_after=after,
    )


def _under_way(outcomes: Sequence[Outcome], moment: float) -> int:
    return sum(outcome.sent_s <= moment < outcome.ended_s for outcome in outcomes)
