"""A worker that is told to stop while it compiles its kernels leaves no compiler behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.testing.scrape import wait_for

pytestmark = pytest.mark.cluster

START_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_compiler_ends_with_the_worker(tmp_path: Path, number: signal.Signals) -> None:
    compiling = tmp_path / "compiling"
    compiler = tmp_path / "bin" / "cc"  # which starts another process, as compilers do
    compiler.parent.mkdir()
    compiler.write_text(
        f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {compiling}.new\nmv {compiling}.new {compiling}\nwait\n"
    )
    compiler.chmod(0o755)
    flags = ("--model=dummy:tiny", "--port=0", f"--run-dir={tmp_path}/run", f"--cache-dir={tmp_path}/cache")
    worker = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "decode", *flags],
        env={**os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}"},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(compiling.exists, "the call of the compiler", timeout=START_S)
        pids = [int(pid) for pid in compiling.read_text().split()]
        worker.send_signal(number)
        status = worker.wait(START_S)
    finally:
        worker.kill()
        worker.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the compiler")
    assert status == (0 if number == signal.SIGTERM else -number)
