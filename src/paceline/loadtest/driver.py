"""Sends the requests of one process at their moments, and keeps what becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from paceline.loadtest.config import Mode, Slo
from paceline.loadtest.frames import Progress
from paceline.loadtest.outcome import STOPPED, Outcome
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.summary import is_good
from paceline.loadtest.target import Clock, Send, Target
from paceline.loadtest.workload import Job, Workload

_READY_TOKENS: Final = 2**20
"""Prompt tokens that are made ready before the clock starts; the rest is made on the way."""

_WARMUPS_AT_ONCE: Final = 8
_TICK_S: Final = 0.01


class Driver:
    """One process's share of a run. `places` is how many of a closed loop's requests it has under way."""

    def __init__(
        self, workload: Workload, target: Target, *, mode: Mode, places: int, share: int, shares: int, slo: Slo | None
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._workload = workload
        self._target = target
        self._mode = mode
        self._places = places
        self._share, self._shares = share, shares
        self._slo = slo
        self._pending = iter(workload.jobs(share, shares))
        self._ready: list[tuple[Job, Send]] = []
        self._lags: list[float] = []
        self._sent = self._failed = self._bad = self._tokens = 0

    async def warm_up(self) -> None:
        """Sends the warm-up, whose outcomes are forgotten, and makes the first requests ready."""
        jobs = iter(self._workload.warmups(self._share, self._shares))
        clock = Clock(0.0)

        async def place() -> None:
            for job in jobs:
                if (await self._prepare(job)(clock)).error == STOPPED:
                    return

        await asyncio.gather(*(place() for _ in range(_WARMUPS_AT_ONCE)))

    def make_ready(self) -> None:
        """Makes the first requests ready, so that a burst at the start is one."""
        tokens = 0
        while tokens < _READY_TOKENS and (job := next(self._pending, None)) is not None:
            self._ready.append((job, self._prepare(job)))
            tokens += job.input_tokens
        self._ready.reverse()

    async def run(self, clock: Clock, duration_s: float | None) -> None:
        """From the clock's start until every request has ended. Being cancelled, it ends those under way as STOPPED."""
        await _until(clock, 0.0)
        ticker = asyncio.create_task(self._tick())
        try:
            if self._mode is Mode.CLOSED:
                await self._run_closed(clock, duration_s)
            else:
                await self._run_open(clock)
        finally:
            ticker.cancel()

    @property
    def progress(self) -> Progress:
        """Counts by now."""
        return Progress(
            sent=self._sent,
            ended=len(self.outcomes),
            failed=self._failed,
            bad=self._bad,
            tokens=self._tokens,
        )

    @property
    def loop_lag_s(self) -> Distribution | None:
        """How late the loop's timers came round."""
        return Distribution.of(self._lags)

    async def _run_open(self, clock: Clock) -> None:
        async with asyncio.TaskGroup() as under_way:
            for job, send in self._requests():
                assert job.at_s is not None
                await _until(clock, job.at_s)
                under_way.create_task(self._one(send, clock))

    async def _run_closed(self, clock: Clock, duration_s: float | None) -> None:
        requests = self._requests()

        async def place() -> None:
            for _, send in requests:
                if duration_s is not None and clock.now() > duration_s:
                    return
                await self._one(send, clock)

        async with asyncio.TaskGroup() as under_way:
            for _ in range(self._places):
                under_way.create_task(place())

    def _requests(self) -> Iterator[tuple[Job, Send]]:
        while self._ready:
            yield self._ready.pop()
        for job in self._pending:
            yield job, self._prepare(job)

    def _prepare(self, job: Job) -> Send:
        return self._target.prepare(job, self._workload.prompt(job))

    async def _one(self, send: Send, clock: Clock) -> None:
        self._sent += 1
        outcome = await send(clock)
        self._keep(outcome)
        if outcome.error == STOPPED:
            raise asyncio.CancelledError  # which `send` has turned into an outcome

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._failed += outcome.error is not None
        self._bad += self._slo is not None and not is_good(outcome, self._slo)
        self._tokens += outcome.output_tokens

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + _TICK_S  # the loop's own time stands still while it is held up
            await asyncio.sleep(_TICK_S)
            self._lags.append(max(0.0, time.monotonic() - due))


async def _until(clock: Clock, moment: float) -> None:
    # Again and again, for timers may be a part of a millisecond early; and nobody could set an event at the moment.
    while (left := moment - clock.now()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)
