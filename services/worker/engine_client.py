"""The front's view of its engine process: spawned, linked, listened to, and mourned."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from paceline.config import WorkerConfig
from paceline.errors import EngineLost
from paceline.log import get_logger
from paceline.services.worker.link import FrontLink
from paceline.services.worker.messages import Alive, FailedStart, Ping, Ready, Report
from paceline.services.worker.process import Birth, EngineProcess
from paceline.services.worker.start_lock import StartLock
from paceline.services.worker.watchdog import Watchdog
from paceline.types import WorkerKey, WorkerLoad

_log = get_logger(__name__)

PING_S: Final = 1.0
"""Interval at which a silent engine is asked to come round."""
_REAP_S: Final = 5.0
"""How long an engine may take to die of a kill. One that the kernel holds, in a driver's call say, takes longer."""


class Loss(msgspec.Struct, frozen=True):
    """How an engine was lost. `reaped`: the process has ended, and writes to nobody's memory any more."""

    why: str
    reaped: bool


class EngineClient:
    """One engine process. `on_report` is called on the loop for every report, in order."""

    def __init__(
        self,
        process: EngineProcess,
        link: FrontLink[Any],
        on_report: Callable[[Any], None],
        *,
        stall_s: float | None = None,
    ) -> None:
        """`stall_s`: how long it may stand still before it is killed; None: for ever."""
        self.pid = process.pid
        self._process = process
        self._link = link
        self._on_report = on_report
        self._load = WorkerLoad()
        self._heard = time.monotonic()
        self._spoke = False  # since the watchdog's last look
        self._stall_s = stall_s
        self._stalled: asyncio.Future[float] = asyncio.get_running_loop().create_future()  # for how long it was silent
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def spawn(
        cls,
        module: str,
        config: WorkerConfig,
        worker: WorkerKey,
        lock: StartLock,
        *,
        report: type[Report],
        on_report: Callable[[Any], None],
    ) -> EngineClient:
        """Starts `module` as the engine process of this life of the worker."""
        link: FrontLink[Any] = FrontLink(lock.directory, Ready | FailedStart | Alive | report)
        birth = Birth.of(worker, str(lock.directory), config)
        process = EngineProcess.spawn(module, birth, inherit=(lock.file_descriptor,))
        return cls(process, link, on_report, stall_s=config.engine_stall_s)

    @property
    def load(self) -> WorkerLoad:
        """The load last reported, with the age of that report while the engine owes one."""
        age_s = max(0.0, time.monotonic() - self._heard - PING_S)
        return msgspec.structs.replace(self._load, tick_age_ms=age_s * 1e3)

    async def ready(self) -> Ready:
        """Waits for the end of the warm-up. Raises the engine's own error, or EngineLost."""
        receive = asyncio.create_task(self._link.receive())
        wait = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait([receive, wait], return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():  # its last words may be under way still
                await asyncio.wait([receive], timeout=0.5)
        finally:
            for task in (receive, wait):
                task.cancel()
        if not receive.done():
            raise EngineLost(f"the engine process ended with status {await self._process.wait()} before it was ready")
        message = receive.result()
        if isinstance(message, FailedStart):
            raise message.failure.error()
        assert isinstance(message, Ready), f"the engine's first words are {type(message).__name__}"
        self._heard = time.monotonic()
        # Until its first report: one that registers without room gets no request before its first heart-beat.
        blocks = message.limits.pool_blocks
        self._load = WorkerLoad(total_blocks=blocks, free_blocks=blocks)
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._ping(), self._watch())]
        return message

    def send(self, command: msgspec.Struct) -> None:
        """Queues a command; Overloaded when the engine is too far behind."""
        self._link.send(command)

    async def lost(self) -> Loss:
        """Returns when the engine process has ended, or stood still for too long and was killed.

        Killed, for nothing less proves that it will not go on: one that was stopped could be resumed and write.
        """
        ended = asyncio.ensure_future(self._process.wait())
        either: list[asyncio.Future[Any]] = [ended, self._stalled]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return Loss(f"ended with status {ended.result()}", reaped=True)
            why = f"gave no sign of life for {self._stalled.result():.0f} s, and was killed"
            self._process.kill()
            await asyncio.wait([ended], timeout=_REAP_S)
            return Loss(why, reaped=ended.done())
        finally:
            ended.cancel()

    async def stop(self) -> None:
        """Ends the process and the link."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # One that is not ready yet does not look at its pipe, and has nothing to lose.
        await self._process.stop(at_once=not self._tasks)
        self._link.close()

    async def _listen(self) -> None:
        try:
            await self._take_reports()
        except Exception:
            # A front that hears nothing more is no front: it ends as if the engine had died, which it now does.
            _log.exception("engine's reports are not understood")
            self._process.kill()
            raise

    async def _take_reports(self) -> None:
        while True:
            report = await self._link.receive()
            self._spoke = True
            if isinstance(report, Alive):
                continue
            self._load = report.load
            self._heard = time.monotonic()
            self._on_report(report)
            await asyncio.sleep(0)  # an engine that is always ahead must not keep its tokens from being written

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if time.monotonic() - self._heard >= PING_S:
                with contextlib.suppress(Exception):
                    self._link.send(Ping())

    async def _watch(self) -> None:
        if self._stall_s is None:
            return
        watchdog = Watchdog(self._stall_s, interval_s=PING_S)
        looked = time.monotonic()
        used_s: float | None = None
        while True:
            await asyncio.sleep(PING_S)
            before, used_before_s = looked, used_s
            looked = time.monotonic()
            spoke, self._spoke = self._spoke, False
            # Asked of silent ones alone: with many threads it takes 2 ms, in which no token is passed on.
            used_s = None if spoke else self._process.cpu_s
            cpu_s = None if used_s is None or used_before_s is None else used_s - used_before_s
            if watchdog.look(elapsed_s=looked - before, spoke=spoke, cpu_s=cpu_s):
                self._stalled.set_result(watchdog.silent_s)
                return
