"""Which way to cut up a copy is proposed, and that the program runs where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.kernels import ScatterCut

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module")
def cuts() -> Any:
    sys.path.insert(0, str(BENCH))  # benches import each other by their plain names
    try:
        import transfer_cuts  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCH))
    return transfer_cuts


def _points(cuts: Any, *of: tuple[int, float, float, int]) -> list[Any]:
    """(programs, churned rate, ms of the product beside it, wrong blocks)."""
    return [
        cuts.Point(str(place), ScatterCut(programs=programs), 300.0, rate, ms / 1e3, wrong)
        for place, (programs, rate, ms, wrong) in enumerate(of)
    ]


@pytest.mark.parametrize(
    ("points", "chosen"),
    [
        ([(32, 300.0, 1.50, 0), (64, 340.0, 1.51, 0)], 1),
        ([(32, 300.0, 1.50, 0), (132, 380.0, 1.60, 0), (64, 340.0, 1.50, 0)], 2),
        ([(32, 300.0, 1.50, 0), (16, 340.0, 1.50, 9)], 0),
        ([(32, 300.0, 1.50, 0), (64, 340.0, 1.50, 0), (16, 339.0, 1.50, 0)], 2),
        ([(32, 300.0, 1.50, 0), (32, 301.0, 1.50, 0)], 1),
        ([(32, 300.0, 1.50, 1)], 0),
    ],
    ids=["the fastest", "not what slows a product", "not what is wrong", "few programs", "the faster", "no other"],
)
def test_the_proposal_is(points: list[tuple[int, float, float, int]], chosen: int, cuts: Any) -> None:
    assert cuts.best(_points(cuts, *points)).name == str(chosen)


def test_every_transport_that_is_here_is_timed_and_its_blocks_are_compared(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "transfer.py"), "--quick", "--programs", "16", "--results", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCH.parent / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {row["name"] for row in json.loads((tmp_path / "transfer.json").read_text())["rows"]}
    assert {"cuda_ipc, 512 tokens, churned", "nixl: blocks that arrived wrong", "ways that write wrong"} <= names
