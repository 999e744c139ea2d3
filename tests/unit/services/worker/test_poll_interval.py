"""How often a worker looks for a write that it awaits."""

from __future__ import annotations

import pytest

from paceline.services.worker.loop import POLL_S, SILENT_POLL_S, poll_interval


@pytest.mark.parametrize(
    ("silence_s", "expected"),
    [(0.0, POLL_S), (0.0128, POLL_S), (0.064, 0.001), (0.128, SILENT_POLL_S), (60.0, SILENT_POLL_S)],
)
def test_the_longer_the_silence_the_rarer_the_look_within_bounds(silence_s: float, expected: float) -> None:
    assert poll_interval(silence_s) == pytest.approx(expected)
