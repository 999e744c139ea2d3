"""What a worker says of a router that it cannot register with."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, DeadlineExceeded, PacelineError, StaleEpoch, UnknownWorker, WorkerLost
from paceline.services.worker.outage import PATIENCE_S, REPEAT_S, Outage, Trouble

AWAY = WorkerLost("Connection refused")
OTHER_MODEL = ConfigError("model: worker d0 serves 'a', and this router 'b'")


def said(outage: Outage, error: PacelineError, *times: float, draining: bool = False) -> list[Trouble | None]:
    return [outage.failed(error, draining=draining, now=now) for now in times]


@pytest.mark.parametrize("error", [AWAY, DeadlineExceeded("late")])
def test_a_router_that_is_away_for_a_moment_is_not_spoken_of(error: PacelineError) -> None:
    outage = Outage()
    assert said(outage, error, 100.0, 100.5, 100.0 + PATIENCE_S - 0.1) == [None, None, None]
    outage.end()
    assert said(outage, error, 200.0) == [None]


def test_a_router_that_stays_away_is_warned_of_again_and_again() -> None:
    outage = Outage()
    first = 100.0 + PATIENCE_S
    assert said(outage, AWAY, 100.0, first, first + REPEAT_S - 0.1, first + REPEAT_S) == [
        None,
        Trouble.AWAY,
        None,
        Trouble.AWAY,
    ]


def test_a_worker_that_drains_does_not_miss_its_router() -> None:
    """A cluster's router stops first."""
    assert said(Outage(), AWAY, 100.0, 200.0, 300.0, draining=True) == [None] * 3


@pytest.mark.parametrize("error", [OTHER_MODEL, StaleEpoch("an earlier life")])
def test_a_refusal_is_told_at_once_and_again_and_again(error: PacelineError) -> None:
    outage = Outage()
    assert said(outage, error, 100.0, 100.5, 100.0 + REPEAT_S, 100.5 + REPEAT_S, 100.0 + 2 * REPEAT_S) == [
        Trouble.REFUSED,
        None,
        Trouble.REFUSED,
        None,
        Trouble.REFUSED,
    ]


def test_a_new_trouble_is_told_whatever_was_said_of_the_last() -> None:
    outage = Outage()
    assert said(outage, OTHER_MODEL, 100.0) == [Trouble.REFUSED]
    assert said(outage, AWAY, 100.5, 100.5 + PATIENCE_S) == [None, Trouble.AWAY]
    assert said(outage, UnknownWorker("who?"), 105.0) == [Trouble.FORGOTTEN]
    assert said(outage, OTHER_MODEL, 105.5) == [Trouble.REFUSED]
