"""One shape under one load: a closed loop for throughput, tier by tier, and a search for goodput in so many probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.loadtest.config import BenchConfig, Slo
from paceline.loadtest.frames import Progress
from paceline.loadtest.measure import Result, measure
from paceline.loadtest.outcome import STOPPED, Outcome
from paceline.loadtest.pools import Sample, WorkerSample
from paceline.loadtest.search import RateSearch
from paceline.loadtest.summary import Summary, Throughput, summarise
from paceline.types import Role
from scaling_cells import Found, Tier

_SAMPLE_S = 0.25


@dataclass(frozen=True)
class Load:
    """Tokens of each prompt and answer. `decode_places`: a closed loop's requests for each decode worker.

    Without them it has as many for every worker as keep prefill workers busy while others are decoded.
    """

    input_tokens: int
    output_tokens: int
    decode_places: int | None = None

    @classmethod
    def parse(cls, text: str) -> Load:
        """`1024x128`, or `128x512@32`. Raises ValueError."""
        lengths, _, places = text.partition("@")
        input_tokens, output_tokens = map(int, lengths.split("x"))
        return cls(input_tokens, output_tokens, int(places) if places else None)

    def concurrency(self, workers: int, decode_workers: int, places: int) -> int:
        """Of the closed loop, with `places` for each worker at most."""
        if self.decode_places is not None:
            return self.decode_places * decode_workers
        return workers * min(places, max(8, 65_536 // self.input_tokens))

    @property
    def searched(self) -> bool:
        """Whether goodput is of interest: not where decode workers are to be filled."""
        return self.decode_places is None

    def __str__(self) -> str:
        places = "" if self.decode_places is None else f"@{self.decode_places}"
        return f"{self.input_tokens}x{self.output_tokens}{places}"


@dataclass(frozen=True)
class Means:
    """How long and how closely to measure."""

    seconds: float  # of sending, in the closed loop and in each probe of a search
    least_requests: int  # of a probe: a share of 99% is told by no fewer than 100
    probes: int  # for all limits together
    tolerance: float
    processes: int
    places: int  # of a closed loop, for each worker at most
    ttft_ms: tuple[float, ...]  # falling: what fails a loose limit fails a tight one
    itl_ms: float


@dataclass(frozen=True)
class Saturation:
    """A closed loop's steady state."""

    result: Result
    steady: Throughput
    prefill: Tier | None
    decode: Tier
    kv_gb_per_s: float
    warnings: list[str]


def saturate(means: Means, router: str, load: Load, *, concurrency: int, prefill: int, decode: int) -> Saturation:
    """Throughput, as long as every place is taken."""
    config = BenchConfig(
        router=router,
        concurrency=concurrency,
        duration_s=means.seconds,
        warmup=4,
        input_len=load.input_tokens,
        output_len=load.output_tokens,
        processes=means.processes,
        sample_s=_SAMPLE_S,
        timeout_s=3600.0,
    )
    result = asyncio.run(measure(config, _quiet))
    steady, warnings = steady_state(result.summary, means.seconds)
    samples = [sample for sample in result.samples if steady.from_s <= sample.at_s <= steady.to_s] or result.samples
    outcomes = [outcome for outcome in result.outcomes if outcome.error is None]
    prompts = [(each.arrivals_s[0], each.input_tokens) for each in outcomes]
    moved = [(each.arrivals_s[0], each.served.bytes) for each in outcomes if each.served]
    later = [(at, tokens) for each in outcomes for at, tokens in zip(each.arrivals_s[1:], each.tokens[1:], strict=True)]
    return Saturation(
        result=result,
        steady=steady,
        prefill=_tier(Role.PREFILL, prefill, rate_of(prompts, steady), samples) if prefill else None,
        decode=_tier(Role.DECODE, decode, rate_of(later, steady), samples),
        kv_gb_per_s=rate_of(moved, steady) / 1e9,
        warnings=[*warnings, *result.warnings],
    )


def rate_of(events: Iterable[tuple[float, int]], window: Throughput) -> float:
    """Of amounts that came at moments, a second, from the first that came within the window to the last.

    The window's own ends fall anywhere between two of them: with ten long prompts in it, that is a tenth of the rate.
    """
    inside = sorted(event for event in events if window.from_s <= event[0] <= window.to_s)
    if not inside or inside[0][0] == inside[-1][0]:
        return sum(amount for _, amount in inside) / window.seconds
    first, last = inside[0][0], inside[-1][0]
    return sum(amount for at, amount in inside if at > first) / (last - first)


def steady_state(summary: Summary, seconds: float) -> tuple[Throughput, list[str]]:
    """The window to take rates from, and what there is to say against it."""
    steady = summary.steady
    if steady is not None and steady.seconds >= seconds / 2:
        return steady, []
    return summary.whole, [f"no steady state within {seconds:g} s: rates are of the whole run, ramp and drain included"]


def _tier(role: Role, workers: int, tokens_per_s: float, samples: Sequence[Sample]) -> Tier:
    seen: dict[str, list[tuple[float, WorkerSample]]] = {}
    for sample in samples:
        for worker in sample.workers:
            if worker.role == role.value:
                seen.setdefault(worker.worker, []).append((sample.at_s, worker))
    every = [worker for series in seen.values() for _, worker in series]
    return Tier(
        workers=workers,
        tokens_per_s=tokens_per_s,
        busy_share=_mean([_busy_share(series) for series in seen.values()]),
        running=_mean([worker.running for worker in every]),
        used_share=_mean([worker.used_blocks / max(1, worker.total_blocks) for worker in every]),
    )


def _busy_share(series: Sequence[tuple[float, WorkerSample]]) -> float:
    """Between the first report and the last one of those seen: a report may be as old as a heart-beat."""
    changes = [after for before, after in pairwise(series) if after[1].busy_s != before[1].busy_s]
    (begin, first), (end, last) = (
        changes[0] if len(changes) > 1 else series[0],
        series[-1] if not changes else changes[-1],
    )
    return min(1.0, (last.busy_s - first.busy_s) / (end - begin)) if end > begin else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def search_goodput(
    means: Means, router: str, load: Load, saturation: float, tell: Callable[[str], None]
) -> tuple[dict[str, Found], int]:
    """Where goodput ends for each limit on the first token, and how many requests failed.

    What was measured at a rate is judged by every limit, so each search begins between the rates known by then.
    """
    probes: dict[float, Result] = {}
    found: dict[str, Found] = {}
    top = max(saturation, 0.1)
    for number, ttft_ms in enumerate(means.ttft_ms):
        left = (means.probes - len(probes)) // (len(means.ttft_ms) - number)
        search = RateSearch(first=0.8 * top, highest=1.3 * top, tolerance=means.tolerance, lowest=top / 64)
        for known in sorted(probes):
            search = search.told(known, well=_goes_well(probes[known], ttft_ms, means.itl_ms))
        for _ in range(left):
            rate = search.next_rate
            if rate is None:
                break
            probes[rate] = _probe(means, router, load, rate, ttft_ms, seed=len(probes) + 1)
            well = _goes_well(probes[rate], ttft_ms, means.itl_ms)
            tell(f"{rate:.3g}/s, TTFT <= {ttft_ms:g} ms: {'well' if well else 'too much'}")
            search = search.told(rate, well=well)
        found[f"{ttft_ms:g}"] = Found(passed=search.passed, failed=search.failed)
    return found, sum(failures(probe.outcomes) for probe in probes.values())


def failures(outcomes: Iterable[Outcome]) -> int:
    """Requests that failed; not those that the run ended itself."""
    return sum(outcome.error not in (None, STOPPED) for outcome in outcomes)


def _probe(means: Means, router: str, load: Load, rate: float, ttft_ms: float, *, seed: int) -> Result:
    config = BenchConfig(
        router=router,
        rate=rate,
        requests=max(means.least_requests, round(rate * means.seconds)),
        warmup=0,
        input_len=load.input_tokens,
        output_len=load.output_tokens,
        processes=means.processes,
        slo_ttft_ms=ttft_ms,
        slo_itl_ms=means.itl_ms,
        seed=seed,
        timeout_s=3600.0,
    )
    return asyncio.run(measure(config, _quiet, give_up=True))


def _goes_well(result: Result, ttft_ms: float, itl_ms: float) -> bool:
    goodput = summarise(result.outcomes, Slo(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3)).goodput
    assert goodput is not None
    return not result.stopped and goodput.share >= result.config.goodput_share


def _quiet(_progress: Progress, _expected: int | None) -> None:
    """Progress is not shown."""
