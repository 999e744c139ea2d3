"""`paceline up` as a person runs it: a terminal, Ctrl-C, a role that dies, a kill -9."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.child import group_members
from paceline.cli.plan import free_ports
from paceline.client import Client, worker_info
from paceline.errors import PacelineError

pytestmark = pytest.mark.cluster

WAIT_S = 120.0


class Up:
    """`paceline up` on a pseudo-terminal of its own, or with pipes."""

    def __init__(self, run_dir: Path, *flags: str, terminal: bool = False, port: int | None = None) -> None:
        port = port or free_ports("127.0.0.1", 1)[0]
        self.address = f"127.0.0.1:{port}"
        self.output = ""
        command = [sys.executable, "-P", "-m", "paceline.cli", "up", f"--port={port}", "--model=dummy:tiny"]
        command += [f"--run-dir={run_dir}", "--pool-blocks=256", "--grace-s=15", *flags]
        self._master, slave = pty.openpty() if terminal else os.pipe()
        # A session of its own, whose terminal this becomes: then Ctrl-C is what the kernel makes of it.
        claim = (
            "import fcntl, os, sys, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        if terminal:
            command = [sys.executable, "-c", claim, *command]
        stdin = slave if terminal else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=stdin, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.output
            self.read(0.05)

    def read(self, seconds: float) -> None:
        if select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # a pseudo-terminal's way of saying end
                data = b""
            self.output += data.decode("utf-8", "replace")
            if not data:
                time.sleep(seconds)

    def until_ready(self) -> Up:
        self.until(lambda: "Paceline is ready at" in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output
        return self

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def processes(self) -> list[int]:
        """Of the router and of each worker, engines too."""
        with Client(self.address) as client:
            found = list(client.server_info().process_ids)
            for worker in client.loads().workers:
                found += worker_info(worker.address, worker.role).process_ids
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start_one(*flags: str, **options: object) -> Up:
        started.append(Up(tmp_path / "run", *flags, **options))
        return started[-1]

    yield start_one
    for up in started:
        up.end()


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and group_members(os.getpgid(pid)) for pid in pids)


def test_ctrl_c_on_a_terminal_stops_every_role_cleanly(start: Callable[..., Up]) -> None:
    up = start(terminal=True).until_ready()
    up.until(lambda: "Ctrl-C" in up.output)
    assert f"paceline chat --router {up.address}" in up.output
    pids = up.processes()
    assert len(pids) == 5
    up.press_ctrl_c()
    assert up.wait() == 0, up.output
    assert gone(pids)
    assert up.output.count("stopping; once more to stop at once") == 1
    assert "did not stop cleanly" not in up.output


def test_a_second_ctrl_c_stops_at_once_and_says_so(start: Callable[..., Up]) -> None:
    up = start("--prefill=0", terminal=True).until_ready()
    pids = up.processes()
    with Client(up.address) as client, client.generate([1, 2, 3], max_tokens=1_900, ignore_eos=True) as answer:
        next(answer)  # which keeps the router waiting
        up.press_ctrl_c()
        up.until(lambda: "stopping; once more to stop at once" in up.output)
        up.press_ctrl_c()
        assert up.wait() == 1, up.output
    assert gone(pids)
    assert up.output.count("once more to stop at once") == 1
    assert up.output.count("stopping at once") == 1
    assert "stopped at once: " in up.output and "did not stop cleanly" not in up.output


def test_without_a_terminal_logs_are_json_lines_and_sigterm_stops(start: Callable[..., Up]) -> None:
    up = start("--prefill=1", "--decode=2").until_ready()
    assert main(["health", up.address]) == 0
    up.process.terminate()
    assert up.wait() == 0, up.output
    up.read(0.1)
    others = [line for line in up.output.splitlines() if not line.startswith("{")]
    assert len(others) == 1
    events = [json.loads(line) for line in up.output.splitlines() if line.startswith("{")]
    (ready,) = [event for event in events if event["event"] == "ready"]
    assert {name: ready[name] for name in ("service", "address", "model", "prefill", "decode")} == {
        "service": "up",
        "address": up.address,
        "model": "dummy:tiny",
        "prefill": 1,
        "decode": 2,
    }
    assert [event for event in events if event["level"] not in ("info", "debug")] == []
    assert re.match(rf"Paceline is ready at {up.address} after \d+\.\d s: dummy:tiny, 3 workers", others[0])


def test_no_role_outlives_a_killed_up(start: Callable[..., Up]) -> None:
    up = start().until_ready()
    pids = up.processes()
    up.process.kill()
    up.until(lambda: gone(pids))


def test_a_killed_role_comes_back_with_its_id_and_port_under_a_new_epoch(start: Callable[..., Up]) -> None:
    up = start("--prefill=0", f"--decode-port={free_ports('127.0.0.1', 1)[0]}").until_ready()
    with Client(up.address) as client:
        before = client.loads().workers[0]
        front = worker_info(before.address, before.role).process_ids[0]
        os.kill(front, signal.SIGKILL)
        up.until(lambda: any(worker.key != before.key for worker in client.loads().workers))
        after = client.loads().workers[-1]
    assert (after.key.worker_id, after.address) == (before.key.worker_id, before.address)
    assert after.key.epoch > before.key.epoch


def test_a_port_in_use_is_said_at_once_with_status_2(start: Callable[..., Up]) -> None:
    first = start("--prefill=0").until_ready()
    port = int(first.address.rpartition(":")[2])
    second = start("--prefill=0", port=port)
    assert second.wait() == 2
    assert second.output == f"error: port {port} of 127.0.0.1 cannot be listened on: Address already in use\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_no_worker_can_have_is_said_once(
    start: Callable[..., Up], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    up = start("--cuda-index=0", terminal=terminal)
    assert up.wait() == 2
    up.read(0.1)
    assert up.output.count("error: device cuda:0: ") == 1
    assert re.search(r"error: (prefill|decode)-0 cannot start \(exit status 2\)", up.output)


def test_a_role_that_keeps_dying_ends_up_with_its_name_and_last_lines(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start("--prefill=0", "--max-deaths=2", f"--log-dir={tmp_path / 'logs'}").until_ready()
    for _ in range(2):
        os.kill(up.processes()[1], signal.SIGKILL)
        up.until(lambda: up.process.poll() is not None or not _answers(up))
        up.until(lambda: up.process.poll() is not None or _answers(up))
    assert up.wait() == 1
    assert "error: decode-0 keeps dying (signal 9)" in up.output
    assert (tmp_path / "logs" / "decode-0.log").stat().st_size > 0


def _answers(up: Up) -> bool:
    try:
        return len(up.processes()) == 3
    except PacelineError:
        return False
