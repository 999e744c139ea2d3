"""A prefill and a decode worker on two GPUs, loaded as the peer was: its table row by row, goodput, kills, a soak.

    python bench/gpu_cluster.py rows goodput kills soak --soak-s 600
    python bench/gpu_cluster.py colocated           # two replicas that do both, for contrast
    python bench/gpu_cluster.py rows --quick        # the small model on the CPU: that the script runs

The peer is vLLM 0.26 with NixlConnector, measured on the same machine with the same shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from cluster import Cluster
from paceline.client import worker_info
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.measure import Result, find_goodput, measure
from paceline.loadtest.statistics import Distribution
from report import Report

PARTS: Final = ("rows", "interference", "goodput", "kills", "soak", "colocated")
MODEL: Final = "dummy:llama-3.1-8b"
REJOIN_S: Final = 90.0


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


@dataclass(frozen=True)
class Means:
    """How this run is made."""

    program: Path
    devices: tuple[str, str]
    model: str
    flags: tuple[str, ...]
    quick: bool

    def cluster(self, *, colocated: bool = False) -> Cluster:
        """One prefill and one decode worker, or two decode workers that do both."""
        first, second = self.devices
        tiers = (
            [f"--decode-devices={first},{second}", "--local-prefill=always"]
            if colocated
            else [f"--prefill-devices={first}", f"--decode-devices={second}"]
        )
        flags = [f"--model={self.model}", "--ready-timeout-s=200", *tiers, *self.flags]
        prefill, decode = (0, 2) if colocated else (1, 1)
        return Cluster(prefill=prefill, decode=decode, flags=flags, paceline=self.program, ready_s=220.0)

    def sized(self, load: Load) -> Load:
        """The load, or a small one of its kind."""
        if not self.quick:
            return load
        concurrency = None if load.concurrency is None else min(load.concurrency, 4)
        rate = None if load.rate is None else 4.0
        output_len = max(load.output_len // 16, min(load.output_len, 2))
        return Load(load.input_len // 32, output_len, 8, concurrency=concurrency, rate=rate, peer=load.peer)


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
    """The row's cells, each beside the peer's."""
    summary, peer = result.summary, load.peer
    ttft, itl = summary.ttft_s, summary.itl_s
    assert ttft is not None
    assert itl is not None
    whole = summary.whole.requests_per_s
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
    if peer is None:
        report.note(f"{load.name}: requests", whole, "/s")
    else:
        report.at_least(f"{load.name}: requests", whole, peer.requests_s, "/s")
    if summary.steady is not None:
        report.note(f"{load.name}: requests in steady state", summary.steady.requests_per_s, "/s")
    hands = summary.handovers
    if hands is not None and hands.transfer_s is not None and hands.through_prefill:
        report.note(
            f"{load.name}: KV of a prompt",
            f"{hands.bytes / hands.through_prefill / 2**20:.0f} MiB; "
            f"first to last part {1e3 * hands.transfer_s.p50:.1f} ms",
        )
    if hands is not None and hands.prefill_s is not None:
        report.note(f"{load.name}: prefill call p50", 1e3 * hands.prefill_s.p50, "ms")
    if load.concurrency == 1:
        gaps = [outcome.itl_s for outcome in result.outcomes if len(outcome.itl_s) > 1]
        first, later = [each[0] for each in gaps], [gap for each in gaps for gap in each[1:]]
        exposed = statistics.median(first) - statistics.median(later)
        report.note(f"{load.name}: first gap beyond the others (hand-off exposed)", 1e3 * exposed, "ms")
    report.equal(f"{load.name}: failed", summary.sent - summary.succeeded, 0)
    for warning in result.warnings:
        report.note(f"{load.name}: warning", warning)


def rows(report: Report, means: Means, cluster: Cluster) -> None:
    """The peer's table."""
    for load in map(means.sized, ROWS):
        show(report, load, run_load(cluster, load))


def interference(report: Report, means: Means, cluster: Cluster) -> None:
    """What 64 answers feel of a saturated prefill worker, and what a prompt's first token feels of 64 answers."""
    answers = means.sized(Load(256, 900, 64, concurrency=64))
    if not means.quick:
        answers = replace(answers, output_len=900)
    prompts = means.sized(Load(1024, 1, 160, concurrency=16))
    single = means.sized(Load(1024, 2, 16, concurrency=1))
    idle = run_load(cluster, single)
    gaps = {}
    for name, beside in (("prefill idle", None), ("prefill saturated", prompts), ("one prompt at a time", single)):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_load, cluster, answers)
            time.sleep(0.5 if means.quick else 2.5)  # all prompts of the answers are computed by then
            other = None if beside is None else run_load(cluster, beside)
            gaps[name] = steady_gaps(running.result())
        spread = Distribution.of(gaps[name])
        if spread is None:
            report.note(f"64 answers, {name}", "were never under way together: too few tokens")
            continue
        report.note(f"64 answers, {name}: inter-token p50 / p99", f"{1e3 * spread.p50:.2f} / {1e3 * spread.p99:.2f} ms")
        if other is not None and beside is single:
            assert other.summary.ttft_s is not None
            assert idle.summary.ttft_s is not None
            report.note("first token p50, decode idle", 1e3 * idle.summary.ttft_s.p50, "ms")
            report.note("first token p50, decode at batch 64", 1e3 * other.summary.ttft_s.p50, "ms")
    alone, beside_prompts = (Distribution.of(gaps[name]) for name in ("prefill idle", "prefill saturated"))
    if alone is not None and beside_prompts is not None:
        report.at_most("inter-token p99, prefill saturated over idle", beside_prompts.p99 / alone.p99, 1.1)
        report.at_most("inter-token p99 over p50, prefill saturated", beside_prompts.p99 / beside_prompts.p50, 1.1)


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


def goodput(report: Report, means: Means, cluster: Cluster) -> None:
    """The highest rate at which 99% of the requests have their first token in 100 ms and tokens each 15 ms."""
    load = means.sized(Load(1024, 128, 200, rate=22.0))
    config = BenchConfig(
        router=cluster.router,
        input_len=load.input_len,
        output_len=load.output_len,
        requests=load.requests,
        rate=load.rate,
        slo_ttft_ms=100.0,
        slo_itl_ms=15.0,
        goodput_tolerance=0.08,
        max_rate=60.0,
        warmup=2,
    )
    found = asyncio.run(find_goodput(config, lambda *_: None, lambda _: None))
    for probe in found.probes:
        good = probe.result.summary.goodput
        report.note(f"goodput at {probe.rate:.1f}/s", f"{100 * good.share:.1f}% good" if good else "stopped early")
    report.at_least("goodput, 1024/128", found.rate or 0.0, 8.0, "/s")


def kills(report: Report, means: Means, cluster: Cluster, times: int) -> None:
    """kill -9 of either worker under load: the other serves on, device memory comes back, the killed one rejoins."""
    load = means.sized(Load(1024, 64, 60, rate=8.0))
    before = device_memory()
    for role in ("decode-0", "prefill-0"):
        for number in range(times):
            victim = engine_pid(cluster, role)
            with loading(cluster, load) as outcome:
                time.sleep(2.0)
                os.kill(victim, signal.SIGKILL)
                killed = time.monotonic()
                wait_for_another(cluster, role, victim)
                rejoined = time.monotonic() - killed
            report.at_most(f"kill {number + 1} of {role}: rejoined after", rejoined, REJOIN_S, "s")
            report.note(f"kill {number + 1} of {role}: requests beside it", outcome())
    result = run_load(cluster, means.sized(Load(1024, 32, 16, concurrency=4)))
    report.equal("after the kills: failed", result.summary.sent - result.summary.succeeded, 0)
    after = device_memory()
    for gpu, used in after.items():
        report.at_most(f"after the kills: memory of GPU {gpu} beyond before", used - before[gpu], 600, "MiB")


def soak(report: Report, means: Means, cluster: Cluster, seconds: float, rate: float) -> None:
    """A long open loop near saturation: nothing leaks, nothing fails."""
    run_load(cluster, means.sized(Load(1024, 128, 64, concurrency=32)))
    memory, host = device_memory(), host_memory(cluster)
    result = run_load(cluster, Load(*(64, 8) if means.quick else (1024, 128), int(seconds * rate), rate=rate))
    time.sleep(2.0)
    report.note("soak: seconds at requests a second", f"{seconds:g} at {rate:g}")
    summary = result.summary
    report.equal("soak: failed", summary.sent - summary.succeeded, 0)
    assert summary.itl_s is not None
    report.note(
        "soak: inter-token p50 / p99 / max",
        f"{1e3 * summary.itl_s.p50:.2f} / {1e3 * summary.itl_s.p99:.2f} / {1e3 * summary.itl_s.max:.1f} ms",
    )
    with cluster.client() as client:
        loads = client.loads()
    for worker in loads.workers:
        load = worker.load
        report.equal(f"soak: blocks of {worker.key.worker_id} in use after it", load.total_blocks - load.free_blocks, 0)
    for gpu, used in device_memory().items():
        report.at_most(f"soak: growth of GPU {gpu}", used - memory[gpu], 64, "MiB")
    for name, used in host_memory(cluster).items():
        report.at_most(f"soak: growth of {name}", used - host.get(name, used), 200, "MiB")


def device_memory() -> dict[str, int]:
    """MiB in use, by GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    return {index.strip(): int(used) for index, used in (line.split(",") for line in lines)}


def host_memory(cluster: Cluster) -> dict[str, int]:
    """Resident MiB of each process of the cluster, by its number."""
    found = {}
    for pid in descendants(cluster.pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            resident = next((line for line in lines if line.startswith("VmRSS:")), "VmRSS: 0 kB")
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-60:]
            found[f"{pid} {name.strip()}"] = int(resident.split()[1]) // 1024
    return found


def descendants(pid: int) -> list[int]:
    """The process and all that come from it."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *(each for child in map(int, listed.stdout.split()) for each in descendants(child))]


def engine_pid(cluster: Cluster, worker: str) -> int:
    """The engine process of a worker."""
    with cluster.client() as client:
        loads = client.loads()
    found = next(each for each in loads.workers if each.key.worker_id == worker)
    return worker_info(found.address, found.role).process_ids[1]  # behind the front's


def wait_for_another(cluster: Cluster, worker: str, pid: int) -> None:
    """Until the worker has registered with another engine than `pid`."""
    deadline = time.monotonic() + REJOIN_S + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if engine_pid(cluster, worker) != pid:
                return
        time.sleep(0.2)


@contextlib.contextmanager
def loading(cluster: Cluster, load: Load) -> Any:
    """Load beside the block; what it gives tells how it went, once the block is over."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_load, cluster, load)

        def outcome() -> str:
            summary = running.result().summary
            return f"{summary.succeeded} of {summary.sent} answered; {summary.errors or 'no error'}"

        yield outcome


def main() -> int:
    """Runs the parts that are asked for; the exit code says whether all limits held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--kills", type=int, default=2, help="times that each worker is killed")
    parser.add_argument("--soak-s", type=float, default=600.0)
    parser.add_argument("--soak-rate", type=float, default=34.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--paceline", type=Path, default=Path(shutil.which("paceline") or "paceline"))
    parser.add_argument("--flags", default="--context-tokens=16384", help="flags for paceline up, separated by spaces")
    parser.add_argument("--name", default="gpu-cluster")
    args = parser.parse_args()
    first, _, second = ("cpu,cpu" if args.quick else args.devices).partition(",")
    flags = () if args.quick else tuple(args.flags.split())
    model = "dummy:tiny" if args.quick else args.model
    means = Means(args.paceline, (first, second), model, flags, args.quick)
    report = Report(args.name)
    with report:
        if set(args.parts) - {"colocated"}:
            with means.cluster() as cluster:
                report.note("ready after", cluster.ready_after_s, "s")
                if "rows" in args.parts:
                    rows(report, means, cluster)
                if "interference" in args.parts:
                    interference(report, means, cluster)
                if "goodput" in args.parts:
                    goodput(report, means, cluster)
                if "kills" in args.parts:
                    kills(report, means, cluster, args.kills)
                if "soak" in args.parts:
                    soak(report, means, cluster, args.soak_s, args.soak_rate)
        if "colocated" in args.parts:
            with means.cluster(colocated=True) as cluster:
                for load in map(means.sized, COLOCATED):
                    show(report, load, run_load(cluster, load))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
