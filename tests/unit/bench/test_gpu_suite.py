"""Jobs in limited time, and what is said of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
STARTS_ANOTHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def suite() -> Any:
    sys.path.insert(0, str(BENCH))  # benches import each other by their plain names
    try:
        return importlib.import_module("gpu_suite")
    finally:
        sys.path.remove(str(BENCH))


def test_every_job_is_a_program_that_knows_its_options(suite: Any) -> None:
    for job in (job for jobs in suite.SUITES.values() for job in jobs):
        text = (BENCH / job.command[0]).read_text()
        options = [each for each in (*job.command[1:], *(job.quick or ())) if each.startswith("--")]
        assert all(f'"{option}"' in text for option in options), job


def test_a_job_that_takes_too_long_is_ended_with_all_that_it_started(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(STARTS_ANOTHER)
    outcome = suite.run(suite.Job("long", (str(tmp_path / "long.py"),), 2.0, ()), tmp_path, quick=False)
    assert outcome.word == "OUT OF TIME"
    started = Path(f"/proc/{int(outcome.output)}/stat")
    deadline = time.monotonic() + 10
    while started.exists() and started.read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_that_fails_is_said_to_have_failed(suite: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("print('before'); raise SystemExit(3)")
    outcome = suite.run(suite.Job("failing", (str(tmp_path / "failing.py"),), 30.0), tmp_path, quick=False)
    text = suite.summary([outcome])
    assert "| failing | FAILED (3) |" in text and "before" in text


def test_sampling_is_timed_and_held_to_its_twin_where_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_suite.py"), "--quick", "--jobs", "sampling", "--out", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    [job] = json.loads((tmp_path / "summary.json").read_text())["jobs"]
    assert "| top-p 0.95 |" in job["output"] and "0 draws of 88 differ" in job["output"]
    assert "| sampling | ok |" in (tmp_path / "summary.md").read_text()
