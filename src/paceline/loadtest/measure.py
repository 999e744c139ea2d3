"""One run from settings to figures, and the search for goodput, which is many."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from paceline.errors import EngineError, RequestCancelled
from paceline.loadtest.backlog import backlog
from paceline.loadtest.config import BenchConfig, Mode
from paceline.loadtest.fleet import Fleet, GeneratorUse
from paceline.loadtest.frames import Progress
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.pools import PoolUse, Sample, Sampler, pool_use
from paceline.loadtest.search import RateSearch
from paceline.loadtest.summary import Summary, summarise
from paceline.loadtest.target import TargetInfo
from paceline.loadtest.targets import make_target
from paceline.loadtest.workload import Workload

_LATE_S: Final = 0.005
_BUSY: Final = 0.8

OnProgress = Callable[[Progress, int | None], None]
"""Is told the counts so far, and how many requests there are to be."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run with everything that was measured."""

    config: BenchConfig
    info: TargetInfo
    summary: Summary
    pools: list[PoolUse]
    generators: list[GeneratorUse]
    stopped: bool  # early: its verdict was clear, or it was interrupted
    interrupted: bool
    outcomes: list[Outcome]
    samples: list[Sample]

    @property
    def warnings(self) -> list[str]:
        """Why its figures may be the generator's own, or of no state that lasts; empty where nothing says so."""
        found = []
        late = self.summary.lateness_s
        if late is not None and late.p99 > _LATE_S:
            found.append(f"1% of all requests were sent {late.p99 * 1e3:.1f} ms late or more")
        for number, use in enumerate(self.generators):
            if use.cpu_share > _BUSY:
                found.append(f"generator process {number} was busy for {use.cpu_share:.0%} of the time")
            if use.loop_lag_s is not None and use.loop_lag_s.p99 > _LATE_S:
                lag_ms = use.loop_lag_s.p99 * 1e3
                found.append(f"generator process {number} stamped 1% of what came {lag_ms:.1f} ms late or more")
        if self.config.mode is Mode.OPEN and (behind := backlog(self.outcomes)) is not None:
            found.append(
                f"the server falls behind: after a third of the sending it answered {behind.answered_per_s:.3g} "
                f"requests/s of {behind.offered_per_s:.3g}, and those under way grew from {behind.under_way_before:,} "
                f"to {behind.under_way_after:,}; latencies are those of a queue that grows, and of this run's length"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run of a search."""

    rate: float
    well: bool
    result: Result


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a search ended. `rate` is None where not even the lowest rate went well."""

    rate: float | None
    probes: list[Probe]
    interrupted: bool  # before it was known to within the tolerance

    @property
    def best(self) -> Result | None:
        """The run at `rate`."""
        return next((probe.result for probe in self.probes if probe.well and probe.rate == self.rate), None)


async def measure(
    config: BenchConfig,
    on_progress: OnProgress,
    *,
    warm: bool = True,
    give_up: bool = False,
    interrupted: asyncio.Event | None = None,
) -> Result:
    """Runs once. With `give_up` it ends as soon as too many requests are bad for `goodput_share`.

    Once `interrupted` is set it ends at once, with the figures so far. Raises PacelineError where the target cannot be
    reached, or the settings do not fit it, and RequestCancelled where there are no figures yet.
    """
    salt = secrets.token_hex(8)
    async with make_target(config, salt) as target:
        info = await target.describe()
        workload = Workload(config, vocab_size=info.vocab_size, context_tokens=info.context_tokens)
        workload.check()
        expected = workload.expected

        def told(progress: Progress) -> bool:
            on_progress(progress, expected)
            return give_up and expected is not None and is_hopeless(progress.bad, expected, config.goodput_share)

        sampler = Sampler(target, config.sample_s)
        async with Fleet(config, info, salt=salt, warm=warm) as fleet, sampler:
            run = await fleet.run(told, sampler.start, interrupted=interrupted)
    if not run.outcomes:
        if run.interrupted:
            raise RequestCancelled("the run was interrupted before its first request")
        raise EngineError("no request was sent")
    return Result(
        config=config,
        info=info,
        summary=summarise(run.outcomes, config.slo),
        pools=pool_use(sampler.samples),
        generators=run.generators,
        stopped=run.stopped,
        interrupted=run.interrupted,
        outcomes=run.outcomes,
        samples=sampler.samples,
    )


def is_hopeless(bad: int, expected: int, share: float) -> bool:
    """True where even if all else of `expected` requests is good, fewer than `share` of them are."""
    return (expected - bad) / expected < share  # computed as the share itself is: any other form rounds otherwise


async def find_goodput(
    config: BenchConfig,
    on_progress: OnProgress,
    on_probe: Callable[[Probe], None],
    *,
    interrupted: asyncio.Event | None = None,
) -> Found:
    """The highest rate at which `goodput_share` of the requests keep the SLO. `on_probe` is told of each run.

    Once `interrupted` is set it ends at once, with what is known by the runs that were ended. Each run has prompts of
    its own, so that none finds what an earlier one left in a cache.
    """
    search = RateSearch(first=config.rate or 1.0, highest=config.max_rate, tolerance=config.goodput_tolerance)
    probes: list[Probe] = []
    while (rate := search.next_rate) is not None:
        seeded = msgspec.structs.replace(config, rate=rate, seed=config.seed + len(probes))
        try:
            result = await measure(seeded, on_progress, warm=not probes, give_up=True, interrupted=interrupted)
        except RequestCancelled:
            return Found(rate=search.passed, probes=probes, interrupted=True)
        if result.interrupted:
            return Found(rate=search.passed, probes=probes, interrupted=True)
        goodput = result.summary.goodput
        assert goodput is not None, "a search has an SLO"
        probe = Probe(rate=rate, well=not result.stopped and goodput.share >= config.goodput_share, result=result)
        probes.append(probe)
        on_probe(probe)
        search = search.told(rate, well=probe.well)
    return Found(rate=search.passed, probes=probes, interrupted=False)
