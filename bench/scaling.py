"""How throughput and goodput grow with workers of each tier, and where one tier holds the other back.

    python bench/scaling.py --devices cuda:0,cuda:1,cuda:2,cuda:3
    python bench/scaling.py --devices cuda:0,cuda:1 --workers-per-device 2 --shapes 2P2D --probes 0
    python bench/scaling.py --devices cuda:0 --workers-per-device 4 --parts 4 --probes 0
    python bench/scaling.py --quick

Each shape (`2P1D`; `4C` is four replicas that prefill and decode) is started anew and loaded with each pair of
lengths: in a closed loop for its throughput at saturation, tier by tier, then by a search for the highest rates that
keep each SLO. `128x512@32` is a closed loop of 32 requests for each decode worker, and no search: it fills decode
workers. `--parts 4` confines each worker to a fourth of its GPU's multiprocessors, so that a tier may grow on one GPU;
what the workers still share is its memory bandwidth and power. Results are kept in `scaling-cells.json` as they come,
so that a benchmark may be done in parts; the table and the plot beside it show all. How long it may take is said
before it begins.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cluster import Cluster, ClusterFailed
from leaks import InUse, check_device_memory_is_back, check_leaks
from memory import device_memory
from mps import Parts
from paceline.errors import PacelineError
from paceline.types import Role
from report import RESULTS, Report, commit
from scaling_cells import Cell, Found, keep, load_cells
from scaling_laws import LEAST_GAIN, gains, ratios
from scaling_measure import Load, Means, failures, saturate, search_goodput
from scaling_report import markdown, plot
from scaling_times import Times
from shapes import Seats, Shape, seat

SHAPES = "1P1D,1P2D,2P1D,1P3D,2P2D,3P1D,4C"
LENGTHS = "1024x128,4096x256,8192x64,128x512@32"
QUICK_SHAPES, QUICK_LENGTHS = "1P1D,1P2D,2P1D,2C", "96x16,32x32@4"
TTFT_MS = "500,200,100"
ITL_MS = 15.0
GPU_MEMORY = 0.9
CELLS = "scaling-cells.json"


@dataclass(frozen=True)
class Setting:
    """What is started, and where."""

    model: str
    per_device: int
    flags: tuple[str, ...]  # of `paceline up`
    parts: int = 0  # of a GPU's multiprocessors, of which a worker has one; 0: it may use them all
    env: Mapping[str, str] = field(default_factory=dict)  # beside what is set anyway

    def cluster(self, shape: Shape, seats: Seats) -> Cluster:
        """The shape on its devices, to be started."""
        flags = [f"--model={self.model}", "--ready-timeout-s=600", *seats.flags()]
        if seats.on_gpu:
            flags.append(f"--memory-fraction={GPU_MEMORY / self.per_device:g}")
        # Requests beyond what workers take wait in the router: at saturation that is the point.
        env = {**os.environ, **self.env, "PACELINE_QUEUE_SIZE": "100000", "PACELINE_QUEUE_TIMEOUT_S": "3600"}
        flags += self.flags
        return Cluster(prefill=shape.prefill, decode=shape.decode, flags=flags, env=env, ready_s=600.0, metrics=False)


def main() -> int:
    """0 where no request failed, nothing leaked, and each worker more brought its tier what it should."""
    arguments = _arguments()
    kept: Path = arguments.out / CELLS
    if arguments.show:
        _show(arguments.out, load_cells(kept))
        print(markdown(load_cells(kept)))
        return 0
    means = _means(arguments)
    times = Times(means, on_gpu=arguments.devices != ["cpu"])
    began = time.monotonic()
    report = Report("scaling", results=arguments.out)
    with report, ExitStack() as stack:
        parts = stack.enter_context(Parts(arguments.parts)) if arguments.parts else None
        setting = Setting(
            _model(arguments),
            arguments.workers_per_device,
            tuple(arguments.up_flags),
            parts=arguments.parts,
            env=parts.env if parts else {},
        )
        planned = list(_plan(report, arguments, setting, load_cells(kept)))
        expected_s = sum(times.shape(shape, loads) for shape, _, loads in planned)
        print(f"about {expected_s / 60:.0f} min ({expected_s:.0f} s) for all of it", flush=True)
        for shape, seats, loads in planned:
            fitting = times.fitting(shape, loads, arguments.within - (time.monotonic() - began))
            if fitting != loads:
                report.note(str(shape), f"left out for want of time: {', '.join(map(str, loads[len(fitting) :]))}")
            if not fitting:
                continue
            try:
                for cell in measure_shape(report, means, setting, shape, seats, fitting):
                    _show(arguments.out, keep(kept, load_cells(kept), cell))
            except (ClusterFailed, PacelineError) as error:  # the other shapes are worth having
                print(error, file=sys.stderr, flush=True)
                report.fail(str(shape), f"{type(error).__name__}: {error}".partition("\n")[0])
    cells = load_cells(kept)
    judge(report, cells)
    print(markdown(cells))
    return report.finish()


def _plan(
    report: Report, arguments: argparse.Namespace, setting: Setting, cells: Sequence[Cell]
) -> Iterator[tuple[Shape, Seats, list[Load]]]:
    """What there is to measure, and where."""
    for shape in arguments.shapes:
        seats = seat(shape, arguments.devices, arguments.workers_per_device)
        if seats is None:
            report.note(str(shape), f"left out: it needs {shape.workers} workers' places")
            continue
        known = {cell.key for cell in cells} if arguments.missing else set()
        loads = [load for load in arguments.lengths if _key(setting, seats, shape, load) not in known]
        if loads:
            yield shape, seats, loads


def measure_shape(
    report: Report, means: Means, setting: Setting, shape: Shape, seats: Seats, loads: Sequence[Load]
) -> Iterator[Cell]:
    """A cell for each load, as it is measured. Then nothing of all that may be left."""
    before = device_memory() if seats.on_gpu else {}
    with setting.cluster(shape, seats) as cluster:
        print(f"{shape}: ready after {cluster.ready_after_s:.1f} s", flush=True)
        warm: InUse | None = None
        for number, load in enumerate(loads):
            cell = measure_cell(means, setting, cluster, shape, seats, load)
            report.note(f"{shape}, {load}: throughput", cell.tokens_per_s, "tokens/s")
            report.equal(f"{shape}, {load}: failed requests", cell.failed, 0)
            check_leaks(report, f"{shape}, {load}", cluster, warm)
            if number == 0:
                warm = InUse.of(cluster)
            yield cell
    check_device_memory_is_back(report, str(shape), before)


def measure_cell(means: Means, setting: Setting, cluster: Cluster, shape: Shape, seats: Seats, load: Load) -> Cell:
    """The closed loop, and the search where one is wanted."""
    concurrency = load.concurrency(shape.workers, shape.decode, means.places)
    saturated = saturate(
        means, cluster.router, load, concurrency=concurrency, prefill=shape.prefill, decode=shape.decode
    )
    summary, steady = saturated.result.summary, saturated.steady
    print(f"  {load} saturated: {steady.tokens_per_s:,.1f} tokens/s", flush=True)
    failed = failures(saturated.result.outcomes)
    goodput: dict[str, Found] = {}
    if load.searched and means.probes:
        goodput, more = search_goodput(
            means, cluster.router, load, steady.requests_per_s, lambda said: print(f"  {load} at {said}", flush=True)
        )
        failed += more
    with cluster.client() as client:
        loads = client.loads()
    return Cell(
        shape=str(shape),
        devices=seats.devices,
        per_device=setting.per_device if seats.on_gpu else 1,
        parts=setting.parts,
        device="cuda" if seats.on_gpu else "cpu",
        model=setting.model,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        commit=commit(),
        concurrency=concurrency,
        tokens_per_s=steady.tokens_per_s,
        requests_per_s=steady.requests_per_s,
        itl_p99_ms=1e3 * summary.itl_s.p99 if summary.itl_s else None,
        prefill=saturated.prefill,
        decode=saturated.decode,
        batch_requests=min(worker.limits.batch_requests for worker in loads.of(Role.DECODE)),
        kv_gb_per_s=saturated.kv_gb_per_s,
        balance=loads.balance,
        failed=failed,
        goodput=goodput,
        slo_itl_ms=means.itl_ms,
        warnings=saturated.warnings,
    )


def judge(report: Report, cells: Sequence[Cell]) -> None:
    """What the cells of all runs say together."""
    for gain in gains(cells):
        if gain.unfit is None:
            report.at_least(f"{gain.name}: one worker more adds", gain.share, LEAST_GAIN, "of one's throughput")
        else:
            report.note(f"{gain.name}: one worker more adds", f"{gain.share:.2f} ({gain.unfit})")
    for ratio in ratios(cells):
        said = "nothing" if ratio.expected is None else f"{ratio.expected} (by {ratio.told_by}'s router)"
        name = f"{ratio.load[0]}x{ratio.load[1]}, {ratio.workers} workers: best, and the estimate"
        report.note(name, f"{ratio.best}; {said}")


def _key(setting: Setting, seats: Seats, shape: Shape, load: Load) -> tuple[object, ...]:
    device, per_device = ("cuda", setting.per_device) if seats.on_gpu else ("cpu", 1)
    return (setting.model, device, per_device, setting.parts, load.input_tokens, load.output_tokens, str(shape))


def _show(out: Path, cells: Sequence[Cell]) -> None:
    """After each cell anew, since a run may be cut off. Where there is no matplotlib `--show` draws them elsewhere."""
    if not cells:
        return
    (out / "scaling.md").write_text(markdown(cells))
    if importlib.util.find_spec("matplotlib") is not None:
        plot(cells, out / "scaling.png")


def _model(arguments: argparse.Namespace) -> str:
    on_gpu = arguments.devices != ["cpu"]
    return arguments.model or ("dummy:llama-3.1-8b" if on_gpu else "smollm2-135m-instruct")


def _means(arguments: argparse.Namespace) -> Means:
    quick = arguments.quick
    return Means(
        seconds=arguments.seconds or (4.0 if quick else 20.0),
        least_requests=arguments.least_requests or (10 if quick else 100),
        probes=arguments.probes if arguments.probes is not None else 2 if quick else 12,
        tolerance=0.1,
        processes=arguments.processes or max(1, min(4, (os.cpu_count() or 1) // 8)),
        places=arguments.places or (4 if quick else 64),
        ttft_ms=tuple(sorted((float(each) for each in arguments.ttft_ms.split(",")), reverse=True)),
        itl_ms=arguments.itl_ms,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=_list, default=["cpu"], help="cpu, or cuda:0,cuda:1,...; shapes take the first"
    )
    parser.add_argument("--workers-per-device", type=int, default=1, metavar="N", help="workers that share a GPU")
    parser.add_argument("--parts", type=int, default=0, metavar="N", help="of a GPU, of which a worker has one (MPS)")
    parser.add_argument("--shapes", default=None, help=f"default {SHAPES}; 4C: four replicas that do both")
    parser.add_argument("--lengths", default=None, help=f"tokens of prompts and answers; default {LENGTHS}")
    parser.add_argument("--ttft-ms", default=None, help=f"limits on the first token; default {TTFT_MS}")
    parser.add_argument("--itl-ms", type=float, default=None, help=f"limit on gaps; default {ITL_MS:g}")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of sending in each run; default 20")
    parser.add_argument("--probes", type=int, default=None, metavar="N", help="rates tried in a search; default 12")
    parser.add_argument("--least-requests", type=int, default=None, metavar="N", help="of a probe; default 100")
    parser.add_argument(
        "--within",
        type=float,
        default=float("inf"),
        metavar="S",
        help="leave out what would not end in so many seconds",
    )
    parser.add_argument("--missing", action="store_true", help="only what the results do not have yet")
    parser.add_argument("--show", action="store_true", help="measure nothing; table and plot of the results in --out")
    parser.add_argument("--places", type=int, default=None, metavar="N", help="of a closed loop, a worker; default 64")
    parser.add_argument("--processes", type=int, default=None, help="generator processes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="few shapes, short prompts: minutes on two cores")
    parser.add_argument("up_flags", nargs="*", metavar="-- FLAG", help="further flags of `paceline up`")
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.parts and (arguments.devices == ["cpu"] or arguments.parts < arguments.workers_per_device):
        parser.error("--parts needs --devices that are GPUs, and a part for each of the --workers-per-device")
    # Three engines on two cores keep no gap short.
    arguments.ttft_ms = arguments.ttft_ms or ("4000,2000" if quick else TTFT_MS)
    arguments.itl_ms = arguments.itl_ms or (2000.0 if quick else ITL_MS)
    try:
        shapes = arguments.shapes or (QUICK_SHAPES if quick else SHAPES)
        arguments.shapes = [Shape.parse(text) for text in shapes.split(",")]
        lengths = arguments.lengths or (QUICK_LENGTHS if quick else LENGTHS)
        arguments.lengths = [Load.parse(text) for text in lengths.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
