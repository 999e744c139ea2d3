"""What can be made is there, and is written down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE)
[ACCEPTED] = re.findall(r"^ACCEPT := (.*)$", MAKEFILE, re.MULTILINE)
NO_BENCHMARKS = ("accept", "demo", "reflecting_client", "stand_in")  # checks, and what these start
BENCHMARKS = sorted(
    path.name
    for path in (ROOT / "bench").glob("*.py")
    if not path.name.startswith(NO_BENCHMARKS) and "__main__" in path.read_text()
)


def test_the_makefile_names_every_acceptance_check() -> None:
    there = {path.stem.removeprefix("accept_").replace("_", "-") for path in (ROOT / "bench").glob("accept_*.py")}
    assert set(ACCEPTED.split()) == there


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "help"])
def test_contributing_says_what_each_target_does(target: str) -> None:
    assert f"`make {target}`" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("name", ACCEPTED.split())
def test_contributing_says_what_each_acceptance_check_shows(name: str) -> None:
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert any(f"`{name}`" in row for row in rows)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_is_listed(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "benchmarking.md").read_text()
