"""What `gpu_cluster.py` sends: the rows of the peer's table, and how a run compares with them."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from cluster import Cluster
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.measure import Result, measure
from paceline.loadtest.summary import Handovers, Summary
from report import Report


@dataclass(frozen=True)
class Peer:
    """A row of the peer's table: milliseconds, and requests a second."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    requests_s: float


@dataclass(frozen=True)
class Load:
    """What is sent. Without a rate, `concurrency` requests are under way at any moment."""

    input_len: int
    output_len: int
    requests: int
    concurrency: int | None = None
    rate: float | None = None
    peer: Peer | None = None

    @property
    def name(self) -> str:
        """As the table calls it."""
        load = f"{self.rate:g}/s" if self.rate else f"{self.concurrency} at once"
        return f"{self.input_len}/{self.output_len}, {load}"


ROWS: Final = (
    Load(1024, 128, 24, concurrency=1, peer=Peer(54.8, 57.2, 4.71, 5.3, 1.5)),
    Load(1024, 128, 240, rate=16.0, peer=Peer(77, 141, 5.3, 15.9, 14.5)),
    Load(1024, 128, 512, concurrency=128, peer=Peer(1961, 3243, 6.6, 59.7, 36.4)),
    Load(4096, 256, 8, concurrency=1, peer=Peer(145, 148, 4.8, 5.4, 0.73)),
    Load(4096, 256, 96, concurrency=16, peer=Peer(309, 1663, 6.5, 30.1, 5.8)),
)
COLOCATED: Final = (
    Load(1024, 128, 512, concurrency=128, peer=None),
    Load(4096, 256, 192, concurrency=64, peer=None),
)


def run_load(cluster: Cluster, load: Load, **more: Any) -> Result:
    """Sends it, a few requests ahead of the clock."""
    config = BenchConfig(
        router=cluster.router,
        input_len=load.input_len,
        output_len=load.output_len,
        requests=load.requests,
        concurrency=load.concurrency,
        rate=load.rate,
        processes=2 if (load.concurrency or 0) > 32 else 1,
        warmup=2,
        **more,
    )
    return asyncio.run(measure(config, lambda *_: None))


def show(report: Report, load: Load, result: Result) -> None:
    """The row's cells, each beside the peer's where it has one, and what else tells of the run."""
    summary = result.summary
    _latencies(report, load, summary)
    whole = summary.whole.requests_per_s
    if load.peer is None:
        report.note(f"{load.name}: requests", whole, "/s")
    else:
        report.at_least(f"{load.name}: requests", whole, load.peer.requests_s, "/s")
    if summary.steady is not None:
        report.note(f"{load.name}: requests in steady state", summary.steady.requests_per_s, "/s")
    _handovers(report, load, summary.handovers)
    if load.concurrency == 1:
        gaps = [outcome.itl_s for outcome in result.outcomes if len(outcome.itl_s) > 1]
        first, later = [each[0] for each in gaps], [gap for each in gaps for gap in each[1:]]
        exposed = statistics.median(first) - statistics.median(later)
        report.note(f"{load.name}: first gap beyond the others (hand-off exposed)", 1e3 * exposed, "ms")
    report.equal(f"{load.name}: failed", summary.sent - summary.succeeded, 0)
    for warning in result.warnings:
        report.note(f"{load.name}: warning", warning)


def _latencies(report: Report, load: Load, summary: Summary) -> None:
    ttft, itl, peer = summary.ttft_s, summary.itl_s, load.peer
    assert ttft is not None
    assert itl is not None
    cells: dict[str, tuple[float, float | None]] = {
        "first token p50": (1e3 * ttft.p50, peer.ttft_p50 if peer else None),
        "first token p99": (1e3 * ttft.p99, peer.ttft_p99 if peer else None),
        "inter-token p50": (1e3 * itl.p50, peer.itl_p50 if peer else None),
        "inter-token p99": (1e3 * itl.p99, peer.itl_p99 if peer else None),
    }
    for name, (value, limit) in cells.items():
        if limit is None:
            report.note(f"{load.name}: {name}", value, "ms")
        else:
            report.at_most(f"{load.name}: {name}", value, limit, "ms")


def _handovers(report: Report, load: Load, hands: Handovers | None) -> None:
    if hands is None:
        return
    if hands.transfer_s is not None and hands.through_prefill:
        report.note(
            f"{load.name}: KV of a prompt",
            f"{hands.bytes / hands.through_prefill / 2**20:.0f} MiB; "
            f"first to last part {1e3 * hands.transfer_s.p50:.1f} ms",
        )
    if hands.prefill_s is not None:
        report.note(f"{load.name}: prefill call p50", 1e3 * hands.prefill_s.p50, "ms")


def steady_gaps(result: Result) -> list[float]:
    """Gaps while all requests were being answered, in seconds."""
    answered = [outcome for outcome in result.outcomes if outcome.arrivals_s]
    begin = max(outcome.arrivals_s[0] for outcome in answered)
    end = min(outcome.arrivals_s[-1] for outcome in answered)
    return [
        later - earlier
        for outcome in answered
        for earlier, later in pairwise(outcome.arrivals_s)
        if begin < earlier and later <= end
    ]
