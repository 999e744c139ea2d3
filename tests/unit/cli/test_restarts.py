from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.restarts import FIRST_DELAY_S, LONGEST_DELAY_S, GiveUp, Restart, RestartPolicy


def test_waits_double_from_death_to_death_up_to_the_longest() -> None:
    policy = RestartPolicy(max_deaths=100)
    delays = [policy.on_death(1, now=float(second), has_served=True) for second in range(8)]
    assert [verdict.delay_s for verdict in delays if isinstance(verdict, Restart)] == [
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        5.0,
        5.0,
        5.0,
    ]


def test_the_fifth_death_within_a_minute_ends_everything() -> None:
    policy = RestartPolicy()
    verdicts = [policy.on_death(-9, now=now, has_served=True) for now in (0.0, 10.0, 20.0, 30.0, 59.9)]
    assert all(isinstance(verdict, Restart) for verdict in verdicts[:4])
    assert verdicts[4] == GiveUp(cannot_start=False)


def test_deaths_that_are_a_minute_old_are_forgotten() -> None:
    policy = RestartPolicy()
    for now in (0.0, 10.0, 20.0, 30.0):
        policy.on_death(1, now=now, has_served=True)
    assert policy.on_death(1, now=60.0, has_served=True) == Restart(1.6)
    assert policy.on_death(1, now=1000.0, has_served=True) == Restart(FIRST_DELAY_S)


def test_a_role_that_cannot_start_is_not_tried_again() -> None:
    assert RestartPolicy().on_death(2, now=0.0, has_served=False) == GiveUp(cannot_start=True)


def test_a_role_that_has_served_is_tried_again_even_when_it_cannot_start() -> None:
    assert RestartPolicy().on_death(2, now=0.0, has_served=True) == Restart(FIRST_DELAY_S)


@pytest.mark.parametrize("status", [0, 1, -9, -15])
def test_any_other_end_is_a_death_whether_it_has_served_or_not(status: int) -> None:
    assert RestartPolicy().on_death(status, now=0.0, has_served=False) == Restart(FIRST_DELAY_S)


@given(st.lists(st.floats(0.0, 40.0), max_size=60), st.integers(1, 8))
def test_it_gives_up_exactly_when_a_window_holds_the_most_deaths(gaps: list[float], most: int) -> None:
    policy = RestartPolicy(max_deaths=most, window_s=60.0)
    now, deaths = 0.0, []
    for gap in gaps:
        now += gap
        deaths.append(now)
        verdict = policy.on_death(1, now=now, has_served=True)
        recent = sum(1 for death in deaths if death > now - 60.0)
        assert isinstance(verdict, GiveUp) == (recent >= most)
        if isinstance(verdict, GiveUp):
            return
        assert FIRST_DELAY_S <= verdict.delay_s <= LONGEST_DELAY_S
