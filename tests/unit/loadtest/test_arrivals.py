from __future__ import annotations

import itertools
import math

import pytest

from paceline.loadtest.arrivals import poisson, replayed
from paceline.loadtest.trace import Entry


def gaps(rate: float, seed: int, count: int) -> list[float]:
    moments = [0.0, *poisson(rate, seed=seed, count=count)]
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


@pytest.mark.parametrize("rate", [0.5, 4.0, 250.0])
def test_gaps_have_the_mean_and_the_spread_of_an_exponential_distribution(rate: float) -> None:
    # Of 20,000 gaps the mean has a standard error of 0.7%, their standard deviation of 1%: five of each are allowed.
    found = gaps(rate, seed=1, count=20_000)
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in found) / len(found))
    assert mean * rate == pytest.approx(1, abs=0.035)
    assert deviation * rate == pytest.approx(1, abs=0.05)
    assert sum(gap * rate > 1 for gap in found) / len(found) == pytest.approx(math.exp(-1), abs=0.017)


def test_equal_seeds_give_equal_moments_and_others_give_others() -> None:
    assert gaps(3.0, seed=7, count=100) == gaps(3.0, seed=7, count=100)
    assert gaps(3.0, seed=7, count=100) != gaps(3.0, seed=8, count=100)


def test_twice_the_rate_is_the_same_process_at_twice_the_speed() -> None:
    slow, fast = (list(poisson(rate, seed=2, count=50)) for rate in (1.0, 2.0))
    assert [moment / 2 for moment in slow] == pytest.approx(fast)


def test_moments_end_at_the_count_or_the_time_whichever_is_sooner() -> None:
    by_time = list(poisson(100.0, seed=0, duration_s=2.0))
    assert 140 < len(by_time) < 260
    assert max(by_time) <= 2.0
    assert list(poisson(100.0, seed=0, duration_s=2.0, count=5)) == by_time[:5]


def test_a_trace_is_replayed_at_its_moments_faster_and_cut() -> None:
    entries = [Entry(0.0, 1, 1), Entry(10.0, 2, 1), Entry(30.0, 3, 1)]
    assert [moment for moment, _ in replayed(entries, speed=10.0)] == [0.0, 1.0, 3.0]
    assert [entry.input_tokens for _, entry in replayed(entries, speed=1.0, duration_s=10.0)] == [1, 2]
    assert [entry.input_tokens for _, entry in replayed(entries, speed=1.0, count=1)] == [1]
