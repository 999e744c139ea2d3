"""Which cases the sanitizer sees, and what of its words is an error."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(BENCH))  # benches import each other by their plain names
try:
    SPEC = importlib.util.spec_from_file_location("bench_sanitize", BENCH / "sanitize.py")
    assert SPEC is not None and SPEC.loader is not None
    module = importlib.util.module_from_spec(SPEC)
    sys.modules[SPEC.name] = module  # dataclasses look their module up there
    SPEC.loader.exec_module(module)
finally:
    sys.path.remove(str(BENCH))

CASES = [f"test_a.py::test_x[{form}-{size}]" for form in ("twin", "triton", "native") for size in range(6)]
CASES += ["test_a.py::test_of_triton_alone", "test_b.py::test_x[1-True]"]


def test_cases_of_triton_are_picked_evenly() -> None:
    picked = module.pick(CASES, {"test_a.py": {"test_x": 3, "test_of_triton_alone": 2}, "test_b.py": {"test_x": 1}})
    assert picked == [
        *(f"test_a.py::test_x[triton-{size}]" for size in (0, 2, 4)),
        "test_a.py::test_of_triton_alone",
        "test_b.py::test_x[1-True]",
    ]


def test_a_test_that_is_gone_is_missed() -> None:
    assert module.missing(CASES, {"test_a.py": {"test_x": 1, "test_y": 1}}) == ["test_a.py::test_y"]


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __global__ write of size 2 bytes\n========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 2),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= COMPUTE-SANITIZER\n", None),
        ("", None),
    ],
)
def test_errors_are_those_of_the_summary(log: str, errors: int | None) -> None:
    assert module.sanitizer_errors(log) == errors


@pytest.mark.parametrize(
    ("output", "passed"),
    [
        (".....\n13 passed in 2.55s\n", 13),
        ("13 passed, 2 warnings in 62.55s (0:01:02)\n", 13),
        ("1 failed, 12 passed in 2.55s\n", 0),
        ("12 passed, 1 error in 2.55s\n", 0),
        ("no tests ran in 0.01s\n", 0),
        ("Segmentation fault\n", 0),
    ],
)
def test_what_failed_beside_others_does_not_count_as_passed(output: str, passed: int) -> None:
    assert module.passed(output) == passed


STAND_IN = """#!/bin/sh
while [ "$1" != "--log-file" ]; do shift; done
echo "========= ERROR SUMMARY: {errors} errors" > "$2"
while [ "$1" != "{python}" ]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize("errors", [0, 2])
def test_an_error_of_the_sanitizer_fails_the_check(errors: int, tmp_path: Path) -> None:
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(STAND_IN.format(errors=errors, python=sys.executable))
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(BENCH / "sanitize.py"), "--families", "step", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == (1 if errors else 0), done.stdout + done.stderr
    assert '"step, memcheck: errors"' in (tmp_path / "sanitize.json").read_text()
