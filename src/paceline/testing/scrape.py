"""What a process's Prometheus endpoint says, as numbers that a test can compare."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

LIVENESS_S: Final = 20.0
"""Seconds within which all that a test waits for has happened, on a machine that is busy with other work."""

Labels = frozenset[tuple[str, str]]


class Scrape:
    """Every sample of one endpoint at one moment. A counter that nothing has counted yet reads 0."""

    def __init__(self, samples: dict[tuple[str, Labels], float]) -> None:
        self._samples = samples

    @classmethod
    def of(cls, port: int, *, timeout: float = 5.0) -> Scrape:
        """Asks `127.0.0.1:port`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=timeout) as answer:
            text = answer.read().decode()
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def value(self, name: str, **labels: str) -> float:
        """One sample."""
        return self._samples.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, whatever others they have."""
        wanted = set(labels.items())
        return sum(value for (of, have), value in self._samples.items() if of == name and wanted <= have)


def wait_for(condition: Callable[[], bool], what: str, *, timeout: float = LIVENESS_S, every: float = 0.002) -> float:
    """Looks until the condition holds, and returns the seconds that took; AssertionError after `timeout`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"{what} did not happen in {timeout:g} s"
        time.sleep(every)
    return time.monotonic() - began
