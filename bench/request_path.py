"""Where a request's time goes between its client and the engines, and what a token costs on its way back.

A router and a prefill and a decode worker serve, each a process as ever, but for their engines, which compute nothing
(`stand_in_engine`): what is left is the request path itself. `stamps/` notes when a request passes which point. With
`--against SRC`, another checkout's `src` serves too, and the two take turns: only then do times of a shared machine
compare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from cluster import HOST, free_run
from paceline.client import AsyncClient, Health, health
from paceline.errors import PacelineError
from paceline.types import Role
from report import Report
from stand_in_engine import SHAPE

BENCH: Final = Path(__file__).parent
READY_S: Final = 60.0
BUDGET_MS: Final = 2.0
PROMPTS: Final = (1_024, 4_096)
OUTPUT: Final = 16
WARM_UP: Final = 20
BATCH: Final = 64
"""Requests at once, of the relay."""
PATH: Final = (
    "client: sends",
    "router: entered",
    "router: read",
    "router: placed",
    "router: calls prefill",
    "prefill: entered",
    "prefill: sent",
    "prefill engine: has it",
    "prefill engine: told",
    "prefill: heard",
    "prefill: replies",
    "router: has the reply",
    "router: writes",
    "client: has the token",
)
BESIDE: Final = (
    "router: calls decode",
    "decode: entered",
    "decode: sent",
    "decode engine: has it",
    "decode engine: told reserved",
    "decode: heard reserved",
    "router: reserved",
)


@dataclass
class Cluster:
    """The processes of one checkout, and what was seen of them."""

    name: str
    router: str
    stamps: Path
    processes: dict[str, subprocess.Popen[bytes]]
    since: dict[int, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By prompt length and point: milliseconds since the client sent the request."""

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each role's front, in seconds; the engine's is not the request path's."""
        return {name: _cpu_s(process.pid) for name, process in self.processes.items()}


@contextlib.contextmanager
def cluster(
    name: str, source: Path, folder: Path, *, first_port: int | None, step_ms: float, stamped: bool
) -> Iterator[Cluster]:
    """A router and two workers of the checkout at `source`, ready."""
    port = first_port or free_run(3)
    router, stamps = f"{HOST}:{port}", folder / f"{name}.stamps"
    paths = (source, BENCH, *([BENCH / "stamps"] if stamped else []))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "REQUEST_STAMPS": str(stamps),
        "STAND_IN_STEP_MS": str(step_ms),
        "OMP_NUM_THREADS": "1",
    }
    common = [f"--run-dir={folder / name}", f"--model={SHAPE.name}", "--log-level=warning"]
    commands = {"router": [sys.executable, "-P", "-m", "paceline.cli", "router", f"--port={port}", *common]}
    for place, role in enumerate(("prefill", "decode"), 1):
        own = [f"--port={port + place}", f"--router={router}", f"--worker-id={role}-0"]
        commands[role] = [sys.executable, str(BENCH / "stand_in_front.py"), role, *own, *common]
    with contextlib.ExitStack() as stack:
        processes = {}
        for role, command in commands.items():
            processes[role] = subprocess.Popen(command, env=environment)
            stack.callback(_end, processes[role])
        _wait(router)
        yield Cluster(name, router, stamps, processes)


def _wait(router: str) -> None:
    from paceline.client import Client

    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(PacelineError):
            if health(router, timeout=1.0) is Health.SERVING:
                with Client(router) as client:
                    loads = client.loads()
                if loads.of(Role.PREFILL) and loads.of(Role.DECODE):
                    return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{router} is not ready after {READY_S:g} s")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cpu_s(pid: int) -> float:
    """All threads of one process; to the nanosecond, where `/proc/PID/stat` counts hundredths of a second."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def latency(clusters: Sequence[Cluster], prompt_tokens: int, requests: int) -> None:
    """Sends requests one after another, to each cluster in turn, and notes when each point was passed."""
    draw = random.Random(prompt_tokens)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(cluster.router)) for cluster in clusters]
        for number in range(WARM_UP + requests):
            for cluster, client in zip(clusters, clients, strict=True):
                prompt = [draw.randrange(3, SHAPE.vocab_size) for _ in range(prompt_tokens)]
                before = cluster.stamps.stat().st_size if cluster.stamps.exists() else 0
                sent = time.monotonic_ns()
                first = 0
                async with client.generate(prompt, max_tokens=OUTPUT, ignore_eos=True) as stream:
                    async for chunk in stream:
                        first = first or time.monotonic_ns()
                        queued = 0.0 if chunk.finish is None else chunk.finish.timings.queued_s
                if number >= WARM_UP:
                    seen = cluster.since[prompt_tokens]
                    seen["client: has the token"].append((first - sent) / 1e6)
                    seen["queued_s"].append(queued * 1e3)
                    _note(seen, cluster.stamps, before, sent)


def _note(seen: dict[str, list[float]], stamps: Path, before: int, sent: int) -> None:
    passed = set()
    with stamps.open() as file:
        file.seek(before)
        for line in file:
            point, when = line.split("\t")
            if point not in passed:
                passed.add(point)
                seen[point].append((int(when) - sent) / 1e6)


@dataclass(frozen=True)
class Relayed:
    """One run of the relay."""

    tokens: int
    seconds: float
    pieces: int
    cpu_s: dict[str, float]
    gaps_ms: list[float]


async def relay(cluster: Cluster, tokens_each: int) -> Relayed:
    """A batch of requests, each of which gets so many tokens, one a step."""
    before, began = cluster.cpu_s(), time.monotonic()
    tokens = pieces = 0
    gaps: list[float] = []

    async def ask(client: AsyncClient) -> None:
        nonlocal tokens, pieces
        last = None
        async with client.generate([9] * 64, max_tokens=tokens_each, ignore_eos=True) as stream:
            async for chunk in stream:
                now = time.monotonic()
                if last is not None and chunk.token_ids:
                    gaps.append((now - last) * 1e3)
                last = now
                tokens += len(chunk.token_ids)
                pieces += 1

    async with AsyncClient(cluster.router) as client:
        await asyncio.gather(*(ask(client) for _ in range(BATCH)))
    seconds = time.monotonic() - began
    after = cluster.cpu_s()
    return Relayed(tokens, seconds, pieces, {name: after[name] - before[name] for name in after}, gaps)


def _tenth(values: Sequence[float]) -> float:
    """The 10th percentile: what the path takes where nothing disturbs it."""
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def _table(report: Report, cluster: Cluster, prompt_tokens: int) -> None:
    seen, last = cluster.since[prompt_tokens], 0.0
    for point in (*PATH[1:], *BESIDE):
        if not seen[point]:
            continue
        low, middle = _tenth(seen[point]), statistics.median(seen[point])
        step = f" (+{low - last:.2f})" if point in PATH else ""
        report.note(f"{cluster.name}, {prompt_tokens}: {point}", f"{low:.2f}{step}  p50 {middle:.2f}", "ms")
        last = low if point in PATH else last
    report.note(f"{cluster.name}, {prompt_tokens}: queued", _tenth(seen["queued_s"]), "ms")


async def measure_latency(report: Report, clusters: Sequence[Cluster], requests: int) -> None:
    """Where the time of a lone request goes."""
    for prompt_tokens in PROMPTS:
        await latency(clusters, prompt_tokens, requests)
        for cluster in clusters:
            _table(report, cluster, prompt_tokens)
        taken = _tenth(clusters[0].since[prompt_tokens]["client: has the token"])
        report.at_most(f"{prompt_tokens} tokens: the path's own time", taken, BUDGET_MS, "ms")


async def measure_relay(report: Report, clusters: Sequence[Cluster], rounds: int, tokens_each: int) -> None:
    """What a token costs."""
    runs: dict[str, list[Relayed]] = {cluster.name: [] for cluster in clusters}
    for cluster in clusters:
        await relay(cluster, tokens_each)
    for _ in range(rounds):
        for cluster in clusters:
            runs[cluster.name].append(await relay(cluster, tokens_each))
    for name, done in runs.items():
        for role in ("decode", "router"):
            report.note(
                f"{name}: CPU of {role} for a token", min(run.cpu_s[role] / run.tokens for run in done) * 1e6, "us"
            )
        best = max(done, key=lambda run: run.tokens / run.seconds)
        report.note(f"{name}: tokens a second", best.tokens / best.seconds)
        report.note(f"{name}: messages for 100 tokens", 100 * best.pieces / best.tokens)
        cuts = [statistics.quantiles(run.gaps_ms, n=100) for run in done]
        p50, p99 = min(each[49] for each in cuts), min(each[98] for each in cuts)
        report.note(f"{name}: gap p50, p99", f"{p50:.2f}, {p99:.2f}", "ms")


def main() -> int:
    """0 where the path itself takes no more than its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="SRC", help="src folder of another checkout, to compare with")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="for each length of prompt")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of the relay")
    parser.add_argument("--step-ms", type=float, default=16.0, metavar="MS", help="between two tokens of the relay")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each of the relay's requests")
    parser.add_argument("--port", type=int, default=None, metavar="P", help="first of 3, or 6; free ones by default")
    arguments = parser.parse_args()
    report = Report("request-path")
    sources = {"here": BENCH.parent / "src"} | ({"there": arguments.against} if arguments.against else {})

    def clusters(stack: contextlib.ExitStack, folder: str, *, step_ms: float, stamped: bool) -> list[Cluster]:
        return [
            stack.enter_context(
                cluster(
                    name,
                    source.absolute(),
                    Path(folder),
                    first_port=arguments.port and arguments.port + 3 * place,
                    step_ms=step_ms,
                    stamped=stamped,
                )
            )
            for place, (name, source) in enumerate(sources.items())
        ]

    with report, tempfile.TemporaryDirectory(prefix="prun-lat") as folder:
        if arguments.requests:
            with contextlib.ExitStack() as stack:
                stamped = clusters(stack, folder, step_ms=1.0, stamped=True)
                uvloop.run(measure_latency(report, stamped, arguments.requests))
        if arguments.rounds:
            with contextlib.ExitStack() as stack:
                plain = clusters(stack, folder, step_ms=arguments.step_ms, stamped=False)
                uvloop.run(measure_relay(report, plain, arguments.rounds, arguments.tokens))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
