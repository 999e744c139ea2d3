from __future__ import annotations

import random

import numpy
import pytest

from paceline.loadtest.statistics import Distribution, percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        ([0.0, 10.0], 99, 9.9),
        ([0.0, 10.0], 0, 0.0),
        ([0.0, 10.0], 100, 10.0),
    ],
)
def test_a_percentile_lies_between_its_neighbours_by_their_distance(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_of_1_to_101_each_percentile_is_a_value() -> None:
    found = Distribution.of(float(value) for value in range(101, 0, -1))
    assert found == Distribution(count=101, mean=51.0, p50=51.0, p90=91.0, p99=100.0, max=101.0)


def test_percentiles_are_numpys() -> None:
    draw = random.Random(5)
    for size in (1, 2, 3, 17, 100, 1001):
        values = sorted(draw.lognormvariate(0, 2) for _ in range(size))
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-12)


def test_of_nothing_there_is_no_distribution() -> None:
    assert Distribution.of([]) is None
