"""A cluster on this machine for benchmarks and checks: `paceline up` on free loopback ports, ended in any case.

with Cluster(prefill=1, decode=1) as cluster, cluster.client() as client:
    client.complete("The peloton", max_tokens=8)
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from paceline.client import Client, Health, health
from paceline.errors import PacelineError
from paceline.types import Role

HOST = "127.0.0.1"
STOP_S = 60.0
_PORTS = (20_000, 29_900)
_ATTEMPTS = 100
_TRIES = 3
_PORT_TAKEN = ("cannot be listened on", "another process listens")
FAILED_LOG = Path(__file__).parent / "results" / "failed-cluster.log"
"""Where the log of the latest cluster is kept under which a check raised."""


def _installed() -> Path:
    """`paceline` of this interpreter's environment; where it was unpacked elsewhere, the first on the PATH."""
    beside = Path(sys.executable).parent / "paceline"
    return beside if beside.exists() else Path(shutil.which("paceline") or beside)


class ClusterFailed(RuntimeError):
    """The cluster did not come up, or did not stop cleanly. The message ends with the last lines of its log."""


class Cluster:
    """`paceline up` as a child process. `flags` go to it as they are; `paceline` is the command to run.

    Without `metrics` each role takes a metrics port of its own choice, and `metrics()` cannot ask for them.
    """

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        paceline: Path | None = None,
        cwd: Path | None = None,
        ready_s: float = 120.0,
        metrics: bool = True,
    ) -> None:
        self.prefill, self.decode, self.ready_s = prefill, decode, ready_s
        self._program = _installed() if paceline is None else paceline
        self._flags, self._with_metrics = flags, metrics
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-cluster-")
        self.run_dir = Path(self._folder.name) / "run"
        self.log_path = Path(self._folder.name) / "log"
        self._choose_ports()
        self._env, self._cwd = dict(os.environ if env is None else env), cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.ready_after_s = 0.0

    @property
    def pid(self) -> int:
        """Process id of `paceline up`."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> Client:
        """A client of the router, to be closed by the caller."""
        return Client(self.router)

    def metrics(self, role: str) -> dict[str, float]:
        """What `router`, `prefill-0`, `decode-0`, ... counts now, by sample, as in `name{label="value"}`."""
        roles = ["router", *(f"prefill-{i}" for i in range(self.prefill)), *(f"decode-{i}" for i in range(self.decode))]
        assert self._metrics_base is not None, "the cluster was made without metrics"
        url = f"http://{HOST}:{self._metrics_base + roles.index(role)}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def start(self) -> Cluster:
        """Starts it and waits until the router serves and every worker is registered. Raises ClusterFailed."""
        self._log = self.log_path.open("ab")
        started = self._launch()
        tries_left = _TRIES
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None:
                tries_left -= 1
                if not tries_left or not any(words in self.log_tail() for words in _PORT_TAKEN):
                    raise ClusterFailed(f"paceline up ended with {self._process.returncode}\n{self.log_tail()}")
                self._log.truncate(0)
                self._choose_ports()
                started = self._launch()
            if time.monotonic() - started > self.ready_s:
                self.stop(clean=False)
                raise ClusterFailed(f"not ready after {self.ready_s:g} s\n{self.log_tail()}")
            time.sleep(0.05)
        self.ready_after_s = time.monotonic() - started
        return self

    def stop(self, *, clean: bool = True) -> float:
        """Ctrl-C; seconds until it had ended. Raises ClusterFailed if `clean` and its exit status is not 0."""
        process = self._process
        if process is None or process.returncode is not None:
            return 0.0
        started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        took = time.monotonic() - started
        if clean and process.returncode != 0:
            raise ClusterFailed(f"paceline up ended with {process.returncode} after Ctrl-C\n{self.log_tail()}")
        return took

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log of all roles."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop(clean=error is None)
        finally:
            if self._log is not None:
                self._log.close()
            if error is not None:
                FAILED_LOG.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.log_path, FAILED_LOG)
            self._folder.cleanup()

    def _choose_ports(self) -> None:
        self.router = f"{HOST}:{free_run(1)}"
        self._metrics_base = free_run(1 + self.prefill + self.decode) if self._with_metrics else None

    def _launch(self) -> float:
        """Starts the process, and gives the time of it."""
        command = [
            str(self._program),
            "up",
            f"--port={self.router.rpartition(':')[2]}",
            f"--prefill={self.prefill}",
            f"--decode={self.decode}",
            "--prefill-port=0",
            "--decode-port=0",
            f"--metrics-port={self._metrics_base or 0}",
            f"--run-dir={self.run_dir}",
            *self._flags,
        ]
        started = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=self._env, cwd=self._cwd
        )
        return started

    def _is_ready(self) -> bool:
        try:
            if health(self.router, timeout=1.0) is not Health.SERVING:
                return False
            with self.client() as client:
                loads = client.loads()
        except PacelineError:
            return False
        return len(loads.of(Role.PREFILL)) >= self.prefill and len(loads.of(Role.DECODE)) >= self.decode


def free_run(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on right now.

    They lie below the range from which systems hand out ports, so that no connection takes one before it is used.
    """
    for _ in range(_ATTEMPTS):
        first = random.SystemRandom().randrange(*_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((HOST, port))
            return first
    raise ClusterFailed(f"no {count} free ports in a row from {_PORTS[0]} to {_PORTS[1]}")
