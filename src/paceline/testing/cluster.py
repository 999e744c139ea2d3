"""A cluster of real processes for tests and benchmarks, kept by the same supervisor as `paceline up`.

::

    with Cluster.start(prefill=1, decode=2, pool_blocks=64) as cluster, cluster.client() as client:
        client.complete([1, 2, 3], max_tokens=4)
        cluster.kill("decode", 0, "engine")
        cluster.wait_ready()
        cluster.wait_idle()

Leaving the block stops it, and raises ClusterFailed unless every role exited cleanly and no process is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from paceline.cli.child import group_members
from paceline.cli.plan import ROUTER, Plan, Sources, make_plan
from paceline.cli.supervisor import Event, Failure, Started, Supervisor
from paceline.client import Client, Health, Loads, Worker, health, worker_info, worker_load
from paceline.config import SECTIONS, UpConfig, load
from paceline.errors import PacelineError
from paceline.settings import settings_of

READY_S: Final = 120.0
IDLE_S: Final = 30.0
DEATH_S: Final = 20.0
_STOP_MARGIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.05
_CALL_S: Final = 2.0
_TAIL: Final = 30

_DEFAULTS: Final[Mapping[str, object]] = {
    "port": 0,
    "model": "dummy:tiny",
    "pool_blocks": 256,
    "threads": 1,
    "grace_s": 15.0,
    "log_json": True,
    "max_deaths": 1_000,  # tests kill more than a person would bear
}

Part = Literal["front", "engine"]


class ClusterFailed(AssertionError):
    """The cluster did not come up, did not become idle, or did not stop cleanly. The message has the last log lines."""


class Cluster:
    """A running cluster. Make it with `start`; its methods may be called from any one thread."""

    def __init__(self, plan: Plan, config: UpConfig, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.address = plan.address
        self.events: list[Event] = []
        self._plan = plan
        self._config = config
        self._folder = folder
        self._lines: list[tuple[str, str]] = []
        self._pids_seen: set[int] = set()
        self._known_processes: dict[str, tuple[int, ...]] = {}
        self._failure: Failure | None = None
        self._stopped = False
        self._supervisor: Supervisor
        self._loop: asyncio.AbstractEventLoop
        self._up = threading.Event()
        # The kernel kills the roles when the thread that started them ends: it lives as long as they do.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="cluster", daemon=True)
        self._thread.start()
        self._up.wait()

    @classmethod
    def start(
        cls,
        prefill: int = 1,
        decode: int = 1,
        *,
        per_role: Mapping[str, Mapping[str, object]] | None = None,
        ready_s: float | None = READY_S,
        **settings: object,
    ) -> Cluster:
        """Starts the roles on free loopback ports and waits until all are ready, unless `ready_s` is None.

        `settings` are settings of `paceline up` or of any role, and go to each role that knows them; `per_role` has
        those of one role or one worker alone: `{"decode": {...}, "prefill-1": {...}}`. The model is `dummy:tiny`
        unless set, which takes prompts of token ids only.
        """
        known = {name for section in SECTIONS.values() for name in settings_of(section)}
        for name in {*settings, *(name for own in (per_role or {}).values() for name in own)} - known:
            raise TypeError(f"{name} is a setting of no role")
        folder = tempfile.TemporaryDirectory(prefix="paceline-")
        flags = {**_DEFAULTS, "run_dir": Path(folder.name) / "run", **settings, "prefill": prefill, "decode": decode}
        try:
            config = load(UpConfig, file=None, env=os.environ, flags=flags)
            plan = make_plan(config, Sources(flags=flags, per_role=per_role or {}), parent=os.getpid())
        except PacelineError:
            folder.cleanup()
            raise
        cluster = cls(plan, config, folder)
        try:
            if ready_s is not None:
                cluster.wait_ready(ready_s)
        except BaseException:
            cluster.kill_all()
            raise
        return cluster

    def client(self) -> Client:
        """A client of the router, to be closed by the caller."""
        return Client(self.address)

    def loads(self) -> Loads:
        """What the router says of its queue and workers."""
        with self.client() as client:
            return client.loads()

    def worker(self, role: str, index: int) -> Worker:
        """A worker as the router sees it. Raises ClusterFailed where it is not registered."""
        for worker in self.loads().workers:
            if worker.key.worker_id == f"{role}-{index}":
                return worker
        raise self._failed(f"{role}-{index} is not registered")

    @property
    def processes(self) -> dict[str, tuple[int, ...]]:
        """Process ids of each role, by name (`router`, `prefill-0`, ...): the front's, then the engine's.

        Those of a worker that does not answer, being stopped or dead, are the last known.
        """
        found = dict(self._known_processes)
        with suppress(PacelineError), self.client() as client:
            found[ROUTER] = client.server_info().process_ids
            for worker in client.loads().workers:
                with suppress(PacelineError):
                    found[worker.key.worker_id] = worker_info(worker.address, worker.role, timeout=_CALL_S).process_ids
        self._known_processes = found
        self._pids_seen.update(pid for pids in found.values() for pid in pids)
        return dict(found)

    def kill(self, role: str, index: int = 0, part: Part = "front", number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to one process of `router`, `prefill` or `decode`, and returns its id.

        After SIGKILL that life of the role is over when this returns, so that `wait_ready` waits for the next one.
        Raises ClusterFailed where the other part outlives it.
        """
        name = ROUTER if role == ROUTER else f"{role}-{index}"
        front = self._supervisor.pid(name)
        pid = self._pid(name, part)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._wait(lambda: self._is_living(name, front), DEATH_S, "not dead")
        return pid

    def log(self, name: str | None = None) -> list[str]:
        """The log lines so far: of one role, or of all in the order they came."""
        return [line for of, line in list(self._lines) if name in (None, of)]

    def wait_ready(self, timeout: float = READY_S) -> None:
        """Until every role's present process serves, and the router knows that life of it. Raises ClusterFailed."""
        self._wait(self._not_ready, timeout, "not ready")

    def wait_idle(self, timeout: float = IDLE_S) -> None:
        """Until nothing is queued or running and every block of every pool is free. Raises ClusterFailed."""
        self._wait(self._not_idle, timeout, "not idle")

    def stop(self) -> None:
        """Stops all roles as Ctrl-C does. Raises ClusterFailed unless all exited with 0 and left no process."""
        if not self._stopped:
            with suppress(PacelineError):
                _ = self.processes  # engines that were restarted since are to be gone as well
            self._end(self._supervisor.stop)
            self._check_clean_end()

    def kill_all(self) -> None:
        """Ends all processes at once, and checks nothing."""
        if not self._stopped:
            self._end(self._stop_at_once)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self.kill_all()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(
            self._plan.roles,
            grace_s=self._config.grace_s,
            max_deaths=self._config.max_deaths,
            window_s=self._config.death_window_s,
            on_line=lambda name, line: self._lines.append((name, line.decode("utf-8", "replace"))),
            on_event=self._on_event,
        )
        self._up.set()
        self._failure = await self._supervisor.run()

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Started):
            self._pids_seen.add(event.pid)
            self._known_processes.pop(event.name, None)

    def _pid(self, name: str, part: Part) -> int:
        front = self._supervisor.pid(name)
        if front is None:
            raise self._failed(f"{name} is between two lives")
        if part == "front":
            return front
        known = self._known_processes.get(name, ())
        pids = known if known[:1] == (front,) else self.processes.get(name, ())
        if pids[:1] != (front,) or len(pids) < 2:
            raise self._failed(f"{name} has no engine process that is known: {pids}")
        return pids[1]

    def _end(self, stop: Callable[[], None]) -> None:
        self._stopped = True
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it ended by itself just now
                self._loop.call_soon_threadsafe(stop)
        self._thread.join(2 * (self._config.grace_s + _STOP_MARGIN_S))
        self._folder.cleanup()
        if self._thread.is_alive():
            raise self._failed("the supervisor does not end")

    def _stop_at_once(self) -> None:
        self._supervisor.stop()
        self._supervisor.stop()

    def _check_clean_end(self) -> None:
        if self._failure is not None:
            raise self._failed(self._failure.describe())
        if self._supervisor.unclean:
            statuses = {name: self._supervisor.last_status(name) for name in self._supervisor.unclean}
            raise self._failed(f"roles did not exit with 0: {statuses}")
        left = {pid for pid in self._pids_seen if group_members(pid) or _runs(pid)}
        if left:
            raise self._failed(f"processes are left: {sorted(left)}")

    def _wait(self, reason: Callable[[], str | None], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                why = reason()
            except PacelineError as error:
                why = error.message
            if why is None:
                return
            if not self._thread.is_alive():
                raise self._failed(self._failure.describe() if self._failure else "it was stopped")
            if time.monotonic() > deadline:
                raise self._failed(f"{what} after {timeout:g} s: {why}")
            time.sleep(_LOOK_EVERY_S)

    def _is_living(self, name: str, front: int | None) -> str | None:
        return f"{name} still lives as {front}" if self._supervisor.pid(name) == front else None

    def _not_ready(self) -> str | None:
        if health(self.address, timeout=_CALL_S) is not Health.SERVING:
            return "the router does not serve"
        registered = {worker.key.worker_id: worker for worker in self.loads().workers}
        for name in self._plan.workers:
            worker = registered.get(name)
            if worker is None:
                return f"{name} is not registered"
            info = worker_info(worker.address, worker.role, timeout=_CALL_S)
            if info.worker != worker.key or info.process_ids[0] != self._supervisor.pid(name):
                return f"the router knows an earlier life of {name}"
            if health(worker.address, timeout=_CALL_S) is not Health.SERVING:
                return f"{name} does not serve"
            self._known_processes[name] = info.process_ids
            self._pids_seen.update(info.process_ids)
        self._loop.call_soon_threadsafe(self._supervisor.mark_served)
        return None

    def _not_idle(self) -> str | None:
        loads = self.loads()
        if loads.queued or loads.active:
            return f"the router has {loads.queued} queued and {loads.active} active requests"
        missing = set(self._plan.workers) - {worker.key.worker_id for worker in loads.workers}
        if missing:
            return f"not registered: {', '.join(sorted(missing))}"
        for worker in loads.workers:
            load = worker_load(worker.address, worker.role, timeout=_CALL_S)
            if load.running or load.waiting or load.free_blocks != load.total_blocks or load.quarantined_blocks:
                return f"{worker.key} has {load}"
        return None

    def _failed(self, message: str) -> ClusterFailed:
        tail = "\n".join(f"{name} | {line}" for name, line in self._lines[-_TAIL:])
        return ClusterFailed(f"{message}\n{tail}")


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
