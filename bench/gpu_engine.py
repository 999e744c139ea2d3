"""The engine alone on one GPU: decode steps over batch and context, prefills over length, as ratios to the bytes.

python bench/gpu_engine.py --device cuda:0 --json engine.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from gpu_timing import event, seconds
from gpus import require
from paceline.checkpoint import ModelConfig, read_config, resolve
from paceline.engine import weights
from paceline.engine.device import create_runner, open_device
from paceline.engine.engine import Engine
from paceline.engine.graph_runner import GraphRunner
from paceline.types import RequestId, SamplingParams

BATCHES: Final = (1, 8, 32, 64, 128, 256)
CONTEXTS: Final = (512, 2_048, 8_192)
PROMPTS: Final = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
STEPS: Final = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point. Milliseconds are medians."""

    kind: str
    batch: int
    tokens: int
    ms: float
    device_ms: float  # of the device alone, back to back
    floor_ms: float
    host_ms: float  # of the host, planning and taking in

    @property
    def text(self) -> str:
        """A line of the table."""
        return (
            f"{self.kind:8} batch {self.batch:4} tokens {self.tokens:6}  {self.ms:9.3f} ms  "
            f"device {self.device_ms:9.3f}  floor {self.floor_ms:8.3f}  ratio {self.ms / self.floor_ms:6.3f}  idle "
            f"{100 * (1 - self.device_ms / self.ms):5.1f}%  host {self.host_ms:6.3f}"
        )


class Bench:
    """One engine, whose steps are timed."""

    def __init__(
        self, engine: Engine, config: ModelConfig, *, weight_bytes: int, copy_bytes_s: float, flops: float
    ) -> None:
        self.engine = engine
        self._config = config
        self.rows: list[Row] = []
        self._weight_bytes = weight_bytes
        self._bandwidth = copy_bytes_s
        self._flops = flops
        self._names = 0

    def decode(self, batch: int, context: int) -> None:
        """Decode steps of `batch` requests, each with `context` tokens stored, which are noise."""
        engine = self.engine
        total = context + STEPS + 8
        if batch * -(-total // 16) + 16 > engine.pool.total:
            print(f"decode   batch {batch:4} tokens {context:6}  does not fit the pool")
            return
        sampling = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            lease = engine.try_reserve(total, upfront_tokens=total)
            assert lease is not None
            engine.add(
                self._name(), self._prompt(context), sampling, lease=lease, computed=context, output=[1], root=None
            )
        walls, hosts = self._run()
        stored = context + STEPS // 2
        kv_bytes = batch * stored * engine.runner.block_bytes / 16
        floor = (self._weight_bytes + kv_bytes) / self._bandwidth
        device = self._device_seconds()
        self._add("decode", batch, context, walls[3:-1], device, floor, hosts[3:-1])

    def prefill(self, length: int) -> None:
        """From the arrival of a prompt to its first token, on an idle engine."""
        engine, times = self.engine, []
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        if length >= engine.limits.context_tokens:
            return
        for _ in range(4):
            lease = engine.try_reserve(length)
            assert lease is not None
            started = time.perf_counter()
            engine.add(self._name(), self._prompt(length), sampling, lease=lease, root=None)
            while engine.has_work:
                engine.step()
            times.append(time.perf_counter() - started)
        floor = self._flops_of(length) / self._flops
        best = statistics.median(times[1:])
        self._add("prefill", 1, length, [best], best, floor, [0.0])

    def _flops_of(self, length: int) -> float:
        config = self._config
        dense = 2 * (self._weight_bytes / 2 - config.vocab_size * config.hidden_size) * length
        attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * length * length / 2
        return float(dense + attention / 0.7)

    def _run(self) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of them those in which the host did not just wait."""
        walls: list[float] = []
        hosts: list[float] = []
        ticks: list[float] = []
        last = time.perf_counter()
        while self.engine.has_work:
            ticks.clear()
            output = self.engine.step(lambda: ticks.append(time.perf_counter()))
            now = time.perf_counter()
            if output.progress:
                waited = ticks[-1] - ticks[0] if ticks else 0.0
                walls.append(now - last)
                hosts.append(now - last - waited)
                last = now
        return walls, hosts

    def _device_seconds(self) -> float:
        """Replays the last step's graph back to back."""
        assert isinstance(self.engine.runner, GraphRunner), "a GPU's engine has graphs"
        graph = self.engine.runner.last_graph
        begin, end = event(), event()
        for _ in range(3):
            graph.replay()
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 20e3

    def profile(self, batch: int, context: int) -> None:
        """Prints what the kernels of such a decode step take."""
        self.decode(batch, context)
        assert isinstance(self.engine.runner, GraphRunner), "a GPU's engine has graphs"
        graph = self.engine.runner.last_graph
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
        for kernel in sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)[:14]:
            print(
                f"    {kernel.self_device_time_total / 1e4:9.4f} ms a step, {kernel.count // 10:5} of {kernel.key[:90]}"
            )

    def _add(
        self,
        kind: str,
        batch: int,
        tokens: int,
        walls: Sequence[float],
        device: float,
        floor: float,
        hosts: Sequence[float],
    ) -> None:
        medians = [1e3 * statistics.median(each) for each in (walls, hosts)]
        row = Row(kind, batch, tokens, medians[0], 1e3 * device, 1e3 * floor, medians[1])
        self.rows.append(row)
        print(row.text, flush=True)

    def _prompt(self, length: int) -> list[int]:
        """Random: equal tokens make equal rows, which a GPU multiplies faster, for they cost it less power."""
        return random.Random(length).choices(range(self.engine.limits.vocab_size), k=length)

    def _name(self) -> RequestId:
        self._names += 1
        return RequestId(str(self._names))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device, capture=False)


def matrix_flops(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: left @ right, device, capture=False)


def main() -> None:
    """Builds the engine, measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-tokens", type=int, default=36_000)
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--profile", type=int, nargs="*", default=(), help="batches to profile, at the first context")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require(args.device)
    device = open_device(args.device)
    started = time.perf_counter()
    copy, flops = copy_bandwidth(device), matrix_flops(device)
    torch.cuda.empty_cache()
    print(f"copy {copy / 1e12:.2f} TB/s, matrix product {flops / 1e12:.0f} TFLOP/s")
    source = resolve(args.model, cache_dir=Path.home() / ".cache/paceline")
    config = msgspec.structs.replace(read_config(source), context_tokens=args.context_tokens)
    loaded = weights.load(source, config, dtype=getattr(torch, args.dtype), device=device)
    print(f"weights {loaded.nbytes / 1e9:.2f} GB after {time.perf_counter() - started:.1f} s", flush=True)
    runner = create_runner(
        config,
        loaded,
        num_blocks=None,
        token_budget=args.token_budget,
        max_requests=args.max_requests,
        fraction=0.9,
    )
    print(f"captured, {runner.pool.shape[0]} blocks, after {time.perf_counter() - started:.1f} s", flush=True)
    engine = Engine(
        config,
        loaded,
        num_blocks=runner.pool.shape[0],
        token_budget=args.token_budget,
        max_requests=args.max_requests,
        runner=runner,
    )
    bench = Bench(engine, config, weight_bytes=loaded.step_nbytes, copy_bytes_s=copy, flops=flops)
    for length in args.prompts:
        bench.prefill(length)
    for context in args.contexts:
        for batch in args.batches:
            bench.decode(batch, context)
    for batch in args.profile:
        bench.profile(batch, args.contexts[0])
    free, total = torch.cuda.mem_get_info(device)
    print(f"memory left {free / 2**30:.1f} of {total / 2**30:.1f} GiB, after {time.perf_counter() - started:.1f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"copy": copy, "flops": flops, "rows": [asdict(row) for row in bench.rows]}))


if __name__ == "__main__":
    main()
