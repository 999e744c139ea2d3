"""Starts the generator processes of a run, starts their clocks together, and gathers what they report.

Progress bars and looks at pools cost processor time that stamps must not wait for, so whatever does not send or receive
stays in this process, however small the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from paceline.errors import EngineError, RequestCancelled, rebuild
from paceline.loadtest.config import BenchConfig, Mode
from paceline.loadtest.frames import (
    Assignment,
    Broken,
    Progress,
    Ready,
    Report,
    Start,
    Stop,
    ToChild,
    frame,
    read_from_child,
)
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.target import TargetInfo

_LEAD_S: Final = 0.1
"""From the last process's being ready to the start, so that the message is there before its moment."""

_EXIT_S: Final = 5.0

OnProgress = Callable[[Progress], bool]
"""Is told the counts of all processes together; True stops the run."""


@dataclass(frozen=True, kw_only=True)
class GeneratorUse:
    """How much of its time a generator process was busy, and how late its loop came round."""

    cpu_share: float  # of one core
    loop_lag_s: Distribution | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run brought, by the number of the request."""

    outcomes: list[Outcome]
    generators: list[GeneratorUse]
    stopped: bool
    interrupted: bool
    start: float  # by the monotonic clock


class Fleet:
    """The processes of one run. Use within its `async with` block, which ends them in any case."""

    def __init__(self, config: BenchConfig, info: TargetInfo, *, salt: str, warm: bool) -> None:
        self._config, self._info, self._salt, self._warm = config, info, salt, warm
        # A process without a place in a closed loop would have nothing to do.
        closed = config.mode is Mode.CLOSED and config.concurrency is not None
        self._shares = min(config.processes, config.concurrency or 1) if closed else config.processes
        self._children: list[asyncio.subprocess.Process] = []
        self._progress: list[Progress] = []
        self._stopped = False
        self._interrupted = False
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        for share in range(self._shares):
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "paceline.loadtest.generator",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process to see; its end is theirs
            )
            self._children.append(child)
            assignment = Assignment(
                config=self._config,
                info=self._info,
                slo=self._config.slo,
                salt=self._salt,
                share=share,
                shares=self._shares,
                warm=self._warm,
            )
            await _tell(child, assignment)
        return self

    async def __aexit__(self, *raised: object) -> None:
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        for child in self._children:
            try:
                async with asyncio.timeout(_EXIT_S):
                    await child.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    async def run(
        self,
        on_progress: OnProgress,
        on_start: Callable[[float], None] = lambda start: None,
        *,
        interrupted: asyncio.Event | None = None,
    ) -> Run:
        """Waits until all are ready, then runs, to the end or until it is `interrupted`. `on_start` is told the start.

        Raises a child's error, and RequestCancelled where it is interrupted before the start.
        """
        interruption = asyncio.create_task((interrupted or asyncio.Event()).wait())
        try:
            await self._until_ready(interruption)
            interruption.add_done_callback(self._on_interrupted)
            return await self._run(on_progress, on_start)
        finally:
            interruption.cancel()
            if self._stopping is not None:
                await self._stopping

    async def _until_ready(self, interruption: asyncio.Task[Literal[True]]) -> None:
        ready = asyncio.create_task(self._all_ready())
        either: list[asyncio.Task[Any]] = [ready, interruption]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RequestCancelled("the run was interrupted before its first request")
            ready.result()
        finally:
            ready.cancel()

    async def _all_ready(self) -> None:
        for child in self._children:
            message = await self._next(child)
            assert isinstance(message, Ready)

    def _on_interrupted(self, interruption: asyncio.Task[Literal[True]]) -> None:
        if not interruption.cancelled():
            self._interrupted = True
            self._stopping = asyncio.create_task(self._stop())

    async def _run(self, on_progress: OnProgress, on_start: Callable[[float], None]) -> Run:
        start = time.monotonic() + _LEAD_S
        on_start(start)
        for child in self._children:
            await _tell(child, Start(start))
        nothing = Progress(sent=0, ended=0, failed=0, bad=0, tokens=0)
        self._progress = [nothing] * self._shares
        reports = await asyncio.gather(*(self._follow(share, on_progress) for share in range(self._shares)))
        seconds = time.monotonic() - start
        outcomes = [outcome for report in reports for outcome in report.outcomes]
        outcomes.sort(key=lambda outcome: outcome.index)
        generators = [
            GeneratorUse(cpu_share=report.cpu_s / seconds, loop_lag_s=report.loop_lag_s) for report in reports
        ]
        return Run(
            outcomes=outcomes,
            generators=generators,
            stopped=self._stopped,
            interrupted=self._interrupted,
            start=start,
        )

    async def _follow(self, share: int, on_progress: OnProgress) -> Report:
        while True:
            message = await self._next(self._children[share])
            if isinstance(message, Report):
                return message
            assert isinstance(message, Progress)
            self._progress[share] = message
            if on_progress(_sum(self._progress)):
                await self._stop()

    async def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            for child in self._children:
                await _tell(child, Stop())

    async def _next(self, child: asyncio.subprocess.Process) -> Ready | Progress | Report:
        assert child.stdout is not None
        try:
            message = await read_from_child(child.stdout)
        except asyncio.IncompleteReadError as error:
            status = await child.wait()
            raise EngineError(f"a generator process ended with status {status}") from error
        if isinstance(message, Broken):
            raise rebuild(message.reason, message.message, message.metadata)
        return message


async def _tell(child: asyncio.subprocess.Process, message: ToChild) -> None:
    assert child.stdin is not None
    # A child that is gone already says why, or ends its output, which is read next.
    with contextlib.suppress(ConnectionError):
        child.stdin.write(frame(message))
        await child.stdin.drain()


def _sum(parts: list[Progress]) -> Progress:
    return Progress(
        sent=sum(part.sent for part in parts),
        ended=sum(part.ended for part in parts),
        failed=sum(part.failed for part in parts),
        bad=sum(part.bad for part in parts),
        tokens=sum(part.tokens for part in parts),
    )
