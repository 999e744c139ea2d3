from __future__ import annotations

import pytest

from paceline.loadtest.measure import is_hopeless
from paceline.loadtest.search import RateSearch


def found(
    limit: float, *, first: float = 1.0, highest: float = 1e3, tolerance: float = 0.05
) -> tuple[float | None, int]:
    """Where a search ends, and after how many probes, where every rate up to `limit` goes well."""
    search = RateSearch(first=first, highest=highest, tolerance=tolerance)
    probes = 0
    while (rate := search.next_rate) is not None:
        search = search.told(rate, well=rate <= limit)
        probes += 1
    return search.passed, probes


@pytest.mark.parametrize("limit", [0.01, 0.3, 1.0, 3.7, 64.0, 999.0])
@pytest.mark.parametrize("first", [0.5, 1.0, 50.0])
def test_the_rate_is_found_to_within_the_tolerance(limit: float, first: float) -> None:
    rate, probes = found(limit, first=first)
    assert rate is not None
    assert limit / 1.05 <= rate <= limit
    assert probes < 25


def test_it_ends_at_the_highest_rate_where_that_goes_well() -> None:
    assert found(1e9, highest=100.0) == (100.0, 8)


def test_it_ends_without_a_rate_where_none_goes_well() -> None:
    rate, probes = found(0.0)
    assert rate is None
    assert probes < 12


def test_the_rates_double_and_then_halve_the_ratio() -> None:
    search = RateSearch(first=1.0, highest=100.0, tolerance=0.5)
    rates = []
    while (rate := search.next_rate) is not None:
        rates.append(rate)
        search = search.told(rate, well=rate < 3)
    assert rates == [1.0, 2.0, 4.0, pytest.approx(8**0.5)]
    assert search.passed == pytest.approx(8**0.5)


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_run_is_given_up_at_the_first_request_that_is_one_too_many(percent: int) -> None:
    """Of 100, so many must be good: none of the rest is one too many, and the next one is."""
    share, spare = percent / 100, 100 - percent
    assert not is_hopeless(spare, 100, share)
    assert is_hopeless(spare + 1, 100, share)
