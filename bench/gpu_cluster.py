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
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cluster import Cluster
from gpu_loads import COLOCATED, ROWS, Load, run_load, show, steady_gaps
from gpus import require
from memory import device_memory, host_memory
from paceline.client import worker_info
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.measure import find_goodput
from paceline.loadtest.statistics import Distribution
from report import Report

PARTS: Final = ("rows", "interference", "goodput", "kills", "soak", "colocated")
MODEL: Final = "dummy:llama-3.1-8b"
REJOIN_S: Final = 90.0
APART_S: Final = 16.0
"""Between two kills of one worker: the fifth death within a minute would end `paceline up`, by its own rule."""


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
        """The load, or a small one of its kind, which nothing of the peer's compares with."""
        if not self.quick:
            return load
        concurrency = None if load.concurrency is None else min(load.concurrency, 4)
        rate = None if load.rate is None else 4.0
        output_len = max(load.output_len // 16, min(load.output_len, 2))
        return Load(load.input_len // 32, output_len, 8, concurrency=concurrency, rate=rate)


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
                if number + 1 < times and not means.quick:
                    time.sleep(max(0.0, APART_S - rejoined))
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
    memory, host = device_memory(), host_memory(cluster.pid)
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
    for name, used in host_memory(cluster.pid).items():
        report.at_most(f"soak: growth of {name}", used - host.get(name, used), 200, "MiB")


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
    require(first, second or first)
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
