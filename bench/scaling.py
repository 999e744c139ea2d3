"""How throughput and goodput grow with workers of each tier, and where one tier holds the other back.

    python bench/scaling.py --devices cuda:0,cuda:1,cuda:2,cuda:3
    python bench/scaling.py --devices cuda:0,cuda:1 --workers-per-device 2 --shapes 1P1D,2P2D -- --pool-blocks=8000
    python bench/scaling.py --quick

Each shape (`2P1D`; `3C` is three replicas that prefill and decode) is started anew and loaded with each pair of
lengths: in a closed loop for its throughput at saturation, then by a search for the highest rate that keeps each SLO.
Results are kept in `bench/results/scaling-cells.json` as they come, so that a benchmark may be done in parts; the table
and the plot beside it show all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from paceline.loadtest.config import BenchConfig, Slo
from paceline.loadtest.frames import Progress
from paceline.loadtest.measure import Result, measure
from paceline.loadtest.search import RateSearch
from paceline.loadtest.summary import summarise
from report import RESULTS, Report, commit
from scaling_report import Cell, keep, load_cells, markdown, plot
from shapes import Seats, Shape, seat

SHAPES = "1P1D,1P2D,2P1D,1P3D,2P2D,3P1D,1C,2C,3C,4C"
LENGTHS = "1024x128,4096x256,8192x64"
TTFT_MS = "500,200,100"
ITL_MS = 15.0
GPU_MEMORY = 0.9
CELLS = "scaling-cells.json"


@dataclass(frozen=True)
class Load:
    """Tokens of each prompt and answer, and a closed loop's requests for each worker."""

    input_tokens: int
    output_tokens: int

    @property
    def places(self) -> int:
        """Enough to fill a decode worker's batch, and no more prompts in wait than an engine gets through soon."""
        return max(4, min(128, 131_072 // self.input_tokens))

    def __str__(self) -> str:
        return f"{self.input_tokens}x{self.output_tokens}"


@dataclass(frozen=True)
class Plan:
    """How long and how closely to measure."""

    model: str
    seconds: float  # of sending, in the closed loop and in each probe of a search
    least_requests: int  # of a probe: a share of 99% is told by no fewer than 100
    tolerance: float
    processes: int
    ttft_ms: tuple[float, ...]  # falling: what fails a loose limit fails a tight one
    itl_ms: float
    flags: tuple[str, ...]  # of `paceline up`


def main() -> int:
    """0 where no request failed at saturation."""
    arguments = _arguments()
    plan = _plan(arguments)
    out: Path = arguments.out
    cells = load_cells(out / CELLS)
    report = Report("scaling", results=out)
    with report:
        for shape in arguments.shapes:
            seats = seat(shape, arguments.devices, arguments.workers_per_device)
            if seats is None:
                report.note(str(shape), f"left out: it needs {shape.workers} workers' places")
                continue
            for cell in measure_shape(plan, shape, seats, arguments.lengths, arguments.workers_per_device):
                cells = keep(out / CELLS, cells, cell)
                name = f"{cell.shape}, {cell.input_tokens}x{cell.output_tokens}"
                report.note(f"{name}: throughput", cell.tokens_per_s, "tokens/s")
                report.equal(f"{name}: failed requests", cell.failed, 0)
    table = markdown(cells)
    (out / "scaling.md").write_text(table)
    print(table)
    plot(cells, out / "scaling.png")
    return report.finish()


def measure_shape(plan: Plan, shape: Shape, seats: Seats, loads: Sequence[Load], per_device: int) -> list[Cell]:
    """A cell for each load."""
    on_gpu = seats.decode[0] != "cpu"
    flags = [f"--model={plan.model}", "--ready-timeout-s=600", *seats.flags()]
    if on_gpu:
        flags.append(f"--memory-fraction={GPU_MEMORY / per_device:g}")
    # Requests beyond what workers take wait in the router: at saturation that is the point.
    env = {**os.environ, "PACELINE_QUEUE_SIZE": "100000", "PACELINE_QUEUE_TIMEOUT_S": "3600"}
    started = Cluster(
        prefill=shape.prefill, decode=shape.decode, flags=[*flags, *plan.flags], env=env, ready_s=600.0, metrics=False
    )
    cells = []
    with started as cluster:
        print(f"{shape}: ready after {cluster.ready_after_s:.1f} s", flush=True)
        for load in loads:
            saturated = _saturate(plan, cluster.router, load, load.places * shape.workers)
            steady = saturated.summary.steady or saturated.summary.whole
            print(f"  {load} saturated: {steady.tokens_per_s:,.1f} tokens/s", flush=True)
            goodput = _goodputs(plan, cluster.router, load, steady.requests_per_s)
            cells.append(
                Cell(
                    shape=str(shape),
                    workers=shape.workers,
                    devices=seats.devices,
                    per_device=per_device if on_gpu else 1,
                    device="cuda" if on_gpu else "cpu",
                    model=plan.model,
                    input_tokens=load.input_tokens,
                    output_tokens=load.output_tokens,
                    commit=commit(),
                    concurrency=load.places * shape.workers,
                    tokens_per_s=steady.tokens_per_s,
                    requests_per_s=steady.requests_per_s,
                    failed=saturated.summary.sent - saturated.summary.succeeded,
                    goodput=goodput,
                    slo_itl_ms=plan.itl_ms,
                    warnings=saturated.warnings,
                )
            )
    return cells


def _saturate(plan: Plan, router: str, load: Load, concurrency: int) -> Result:
    config = BenchConfig(
        router=router,
        concurrency=concurrency,
        duration_s=plan.seconds,
        warmup=4,
        input_len=load.input_tokens,
        output_len=load.output_tokens,
        processes=plan.processes,
        timeout_s=3600.0,
    )
    return asyncio.run(measure(config, _quiet))


def _goodputs(plan: Plan, router: str, load: Load, saturation: float) -> dict[str, float | None]:
    """The highest rate for each limit on the first token. What was measured at a rate is judged by every limit."""
    probes: dict[float, Result] = {}
    found: dict[str, float | None] = {}
    top = max(saturation, 0.1)
    for ttft_ms in plan.ttft_ms:
        search = RateSearch(first=top / 2, highest=2 * top, tolerance=plan.tolerance, lowest=top / 64)
        while (rate := search.next_rate) is not None:
            if rate not in probes:
                probes[rate] = _probe(plan, router, load, rate, ttft_ms, seed=len(probes) + 1)
            well = _goes_well(probes[rate], ttft_ms, plan.itl_ms)
            print(f"  {load} at {rate:.3g}/s, TTFT <= {ttft_ms:g} ms: {'well' if well else 'too much'}", flush=True)
            search = search.told(rate, well=well)
        found[f"{ttft_ms:g}"] = search.passed
    return found


def _probe(plan: Plan, router: str, load: Load, rate: float, ttft_ms: float, *, seed: int) -> Result:
    config = BenchConfig(
        router=router,
        rate=rate,
        requests=max(plan.least_requests, round(rate * plan.seconds)),
        warmup=0,
        input_len=load.input_tokens,
        output_len=load.output_tokens,
        processes=plan.processes,
        slo_ttft_ms=ttft_ms,
        slo_itl_ms=plan.itl_ms,
        seed=seed,
        timeout_s=3600.0,
    )
    return asyncio.run(measure(config, _quiet, give_up=True))


def _goes_well(result: Result, ttft_ms: float, itl_ms: float) -> bool:
    goodput = summarise(result.outcomes, Slo(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3)).goodput
    assert goodput is not None
    return not result.stopped and goodput.share >= result.config.goodput_share


def _quiet(progress: Progress, expected: int | None) -> None:
    """Progress is not shown."""


def _plan(arguments: argparse.Namespace) -> Plan:
    quick = arguments.quick
    on_gpu = arguments.devices != ["cpu"]
    model = arguments.model or ("dummy:tiny" if quick else "dummy:llama-3.1-8b" if on_gpu else "smollm2-135m-instruct")
    return Plan(
        model=model,
        seconds=arguments.seconds or (1.0 if quick else 20.0),
        least_requests=arguments.least_requests or (20 if quick else 100),
        tolerance=0.6 if quick else 0.1,
        processes=arguments.processes,
        ttft_ms=tuple(sorted((float(each) for each in arguments.ttft_ms.split(",")), reverse=True)),
        # Three engines on two cores keep no gap short.
        itl_ms=arguments.itl_ms or (100.0 if quick else ITL_MS),
        flags=tuple(arguments.up_flags),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--devices", type=_list, default=["cpu"], help="cpu, or cuda:0,cuda:1,...; shapes take the first"
    )
    parser.add_argument("--workers-per-device", type=int, default=1, metavar="N", help="workers that share a GPU")
    parser.add_argument("--shapes", default=None, help=f"default {SHAPES}; 3C: three replicas that do both")
    parser.add_argument("--lengths", default=None, help=f"tokens of prompts and answers; default {LENGTHS}")
    parser.add_argument("--ttft-ms", default=TTFT_MS, help=f"limits on the first token; default {TTFT_MS}")
    parser.add_argument("--itl-ms", type=float, default=None, help=f"limit on gaps; default {ITL_MS:g}")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of sending in each run; default 20")
    parser.add_argument("--least-requests", type=int, default=None, metavar="N", help="of a probe; default 100")
    parser.add_argument("--processes", type=int, default=1, help="generator processes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, few shapes, short prompts: minutes on a CPU"
    )
    parser.add_argument("up_flags", nargs="*", metavar="-- FLAG", help="further flags of `paceline up`")
    arguments = parser.parse_args()
    try:
        shapes = arguments.shapes or ("1P1D,1P2D,2P1D,2C" if arguments.quick else SHAPES)
        arguments.shapes = [Shape.parse(text) for text in shapes.split(",")]
        lengths = arguments.lengths or ("64x8,128x16,256x4" if arguments.quick else LENGTHS)
        arguments.lengths = [Load(*map(int, text.split("x"))) for text in lengths.split(",")]
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return arguments


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
