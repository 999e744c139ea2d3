"""Whether a server keeps up with an open loop, of outcomes made by simulation."""

from __future__ import annotations

import heapq
import random

import pytest

from paceline.loadtest.arrivals import poisson
from paceline.loadtest.backlog import backlog
from paceline.loadtest.outcome import Outcome


def run(
    rate: float, *, servers: int, service_s: float, count: int, seed: int = 0, error: str | None = None
) -> list[Outcome]:
    """So many requests to a server that works on `servers` of them at once, each for about `service_s`."""
    draw = random.Random(seed)
    free = [0.0] * servers
    outcomes = []
    for index, sent in enumerate(poisson(rate, seed=seed, count=count)):
        begun = max(sent, heapq.heappop(free))
        ended = begun + service_s * draw.uniform(0.8, 1.2)
        heapq.heappush(free, ended)
        outcomes.append(
            Outcome(
                index=index,
                scheduled_s=sent,
                sent_s=sent,
                ended_s=ended,
                arrivals_s=[ended],
                tokens=[1],
                input_tokens=1,
                asked_tokens=1,
                output_tokens=1,
                error=error,
            )
        )
    return outcomes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("count", "load"), [(20, 0.5), (100, 0.7), (1_000, 0.8)])
def test_a_server_that_keeps_up_is_not_said_to_fall_behind(seed: int, count: int, load: float) -> None:
    assert backlog(run(load * 8 / 0.5, servers=8, service_s=0.5, count=count, seed=seed)) is None


@pytest.mark.parametrize("seed", range(20))
def test_long_answers_alone_are_no_backlog(seed: int) -> None:
    """Fifty requests are under way at any moment, once the first have ended."""
    assert backlog(run(10.0, servers=10_000, service_s=5.0, count=200, seed=seed)) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("load", [1.3, 2.0, 10.0])
def test_a_server_that_is_offered_more_than_it_can_falls_behind(seed: int, load: float) -> None:
    capacity = 8 / 0.5
    found = backlog(run(load * capacity, servers=8, service_s=0.5, count=600, seed=seed))
    assert found is not None
    assert found.answered_per_s == pytest.approx(capacity, rel=0.15)
    assert found.offered_per_s == pytest.approx(load * capacity, rel=0.25)
    assert found.under_way_after > found.under_way_before


def test_a_run_that_ends_before_anything_was_answered_says_nothing() -> None:
    assert backlog(run(1_000.0, servers=1_000, service_s=60.0, count=50)) is None


def test_a_server_that_fails_at_once_is_told_of_by_its_errors_alone() -> None:
    assert backlog(run(50.0, servers=100, service_s=0.01, count=100, error="OVERLOADED")) is None


def test_one_request_is_no_load() -> None:
    assert backlog(run(1.0, servers=1, service_s=1.0, count=1)) is None
