"""Looks at the router's queue and its workers' pools while a run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.client import Loads
from paceline.errors import PacelineError
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.target import Clock, Target


@dataclass(frozen=True, kw_only=True)
class WorkerSample:
    """A worker at one moment, as its latest heart-beat (a second old at most, by default) has it."""

    worker: str
    role: str
    used_blocks: int
    total_blocks: int
    running: int
    waiting: int
    busy_s: float  # since its engine's start


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A router at one moment."""

    at_s: float
    queued: int
    active: int
    workers: list[WorkerSample]


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """A worker over a run."""

    worker: str
    role: str
    used_share: Distribution
    running: Distribution
    most_waiting: int


class Sampler:
    """Looks every `every_s` while its `async with` block lasts. A look that fails is left out."""

    def __init__(self, target: Target, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._target = target
        self._every_s = every_s
        self._clock: Clock | None = None
        self._task: asyncio.Task[None]

    def start(self, start: float) -> None:
        """The run starts at this reading of the monotonic clock; what is seen before is dropped."""
        self._clock = Clock(start)

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})  # which, unlike a suppressed await, does not swallow our own cancellation

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            clock = self._clock
            if clock is None or clock.now() < 0:
                continue
            with contextlib.suppress(PacelineError):
                loads = await self._target.loads()
                if loads is None:
                    return
                self.samples.append(_sample(loads, clock.now()))


def _sample(loads: Loads, at_s: float) -> Sample:
    workers = [
        WorkerSample(
            worker=worker.key.worker_id,
            role=worker.role.value,
            used_blocks=worker.load.total_blocks - worker.load.free_blocks,
            total_blocks=worker.load.total_blocks,
            running=worker.load.running,
            waiting=worker.load.waiting,
            busy_s=worker.load.work.busy_s,
        )
        for worker in loads.workers
    ]
    return Sample(at_s=at_s, queued=loads.queued, active=loads.active, workers=workers)


def pool_use(samples: Sequence[Sample]) -> list[PoolUse]:
    """Each worker's use over the samples, by name. Blocks that only the prefix cache holds count as free."""
    by_worker: dict[str, list[WorkerSample]] = {}
    for sample in samples:
        for worker in sample.workers:
            by_worker.setdefault(worker.worker, []).append(worker)
    found = []
    for name, seen in sorted(by_worker.items()):
        used = Distribution.of(each.used_blocks / max(1, each.total_blocks) for each in seen)
        running = Distribution.of(float(each.running) for each in seen)
        assert used is not None and running is not None
        waiting = max(each.waiting for each in seen)
        found.append(PoolUse(worker=name, role=seen[0].role, used_share=used, running=running, most_waiting=waiting))
    return found
