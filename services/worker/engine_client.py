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
from paceline.services.worker.messages import FailedStart, Ping, Ready, Report
from paceline.services.worker.process import Birth, EngineProcess
from paceline.services.worker.start_lock import StartLock
from paceline.types import WorkerKey, WorkerLoad

_log = get_logger(__name__)

PING_S: Final = 1.0
"""Interval at which a silent engine is asked to come round."""


class EngineClient:
    """One engine process. `on_report` is called on the loop for every report, in order."""

    def __init__(self, process: EngineProcess, link: FrontLink[Any], on_report: Callable[[Any], None]) -> None:
        self.pid = process.pid
        self._process = process
        self._link = link
        self._on_report = on_report
        self._load = WorkerLoad()
        self._heard = time.monotonic()
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
        link: FrontLink[Any] = FrontLink(lock.directory, Ready | FailedStart | report)
        birth = Birth.of(worker, str(lock.directory), config)
        return cls(EngineProcess.spawn(module, birth, inherit=(lock.file_descriptor,)), link, on_report)

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
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._ping())]
        return message

    def send(self, command: msgspec.Struct) -> None:
        """Queues a command; Overloaded when the engine is too far behind."""
        self._link.send(command)

    async def lost(self) -> int:
        """Returns when the engine process has ended, with its status."""
        return await self._process.wait()

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
