"""How fast each transport moves KV from one GPU to another, beside a plain copy between the two in the same run.

Blocks of 2 MiB, as Llama-3-8B's in bfloat16, of pools of their own in two processes: `run` writes neighbours to
neighbours, as into a fresh pool, `churned` writes random blocks to random blocks. Needs two GPUs.

    python bench/transfer.py [--transports cuda_ipc,nixl,ucxx]
    python bench/transfer.py --transports cuda_ipc --programs 16,32,64,132 [--cuts "pieces; small pieces"]
    python bench/transfer.py --quick       # pools in host memory: tries the program

Each transport has a process of its own: NIXL and ucxx bring a UCX each. With `--programs`, ways to cut up the copy of
`cuda_ipc` are timed against each other in one pair of processes, and the best one is named.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gpu_timing import seconds
from gpus import require
from paceline.kvtransfer.transports import cuda_ipc, nixl, ucxx
from paceline.kvtransfer.transports.transport import Piece
from paceline.types import BLOCK_TOKENS
from report import Report
from transfer_cuts import SHAPES, best, sweep
from transfer_pair import GPUS, HOST, Setup, Target, Timed, Writer

SHARE = 0.8
"""Least share of the plain copy's bandwidth, for the longest prompt over cuda_ipc."""
SEEN_S = 0.0002
"""Most that a target may take to see a notification, of the median, when it polls as a worker does."""
AVAILABLE = {"cuda_ipc": cuda_ipc.available, "nixl": nixl.available, "ucxx": ucxx.available}


@dataclass
class Measured:
    """One transport."""

    prompts: dict[tuple[int, bool], Timed] = field(default_factory=dict)  # by tokens, and whether on churned pools
    wrong: int = 0  # blocks
    bare: Timed | None = None  # notifications behind no data
    one: Timed | None = None  # writes of a block
    missing: str | None = None  # why it is not here


def measure(name: str, setup: Setup) -> Measured:
    """One transport over all lengths and both shapes of pools."""
    found = Measured()
    if setup.on_gpus or name != "cuda_ipc":
        found.missing = AVAILABLE[name]()
    if found.missing is not None:
        return found
    with closing(Target(name, setup)) as target, closing(Writer(name, target, setup)) as writer:
        for tokens in setup.tokens:
            for churned in (False, True):
                pieces = setup.pieces(tokens, churned=churned)
                writer.renew()
                found.prompts[tokens, churned] = writer.write(pieces)
                found.wrong += writer.wrong(pieces)
        found.bare = writer.write([], repeats=10 * setup.repeats)
        found.one = writer.write([Piece(0, 0, 1)], repeats=10 * setup.repeats)
    return found


def tell(report: Report, name: str, found: Measured, floors: dict[int, float], setup: Setup) -> None:
    """What was measured of a transport, and whether its bounds hold; those of speed are a GPU's."""
    if found.missing is not None:
        report.note(name, f"not here: {found.missing}")
        return
    for (tokens, churned), timed in found.prompts.items():
        label = f"{name}, {tokens} tokens, {'churned' if churned else 'run'}"
        share = timed.gigabytes_per_second / floors[tokens]
        report.note(label, f"{timed}; {share:.2f} of a plain copy")
        if setup.on_gpus and name == "cuda_ipc" and tokens == max(setup.tokens):
            report.at_least(f"{label}: share of a plain copy", share, SHARE)
    report.at_most(f"{name}: blocks that arrived wrong", found.wrong, 0)
    assert found.bare is not None and found.one is not None
    report.note(f"{name}, notification alone", f"target told after {statistics.median(found.bare.seen) * 1e3:.3f} ms")
    report.note(f"{name}, one block", found.one)
    if setup.on_gpus and name == "cuda_ipc":
        later = statistics.median(s - e for s, e in zip(found.one.seen, found.one.ended, strict=True))
        report.at_most(f"{name}: a target sees after its writer knows", later * 1e6, SEEN_S * 1e6, "us")


def compare(report: Report, setup: Setup, programs: list[int], names: list[str]) -> None:
    """Ways to cut up the copy, and the one to use."""
    alone, points = sweep(setup, programs, names)
    report.note("matrix product alone", f"{1e3 * alone:.3f} ms")
    for point in points:
        report.note(point.name, point)
    report.at_most("ways that write wrong", sum(point.wrong > 0 for point in points), 0)
    chosen = best(points)
    gain = chosen.churned / points[0].churned
    report.note("proposal", f"{chosen.cut}: {gain:.2f} of the churned rate as it is")


def plain_copy(num_bytes: int, setup: Setup) -> float:
    """Bytes a second of a copy between the first and the last GPU by one process: the median of several."""
    there = f"cuda:{torch.cuda.device_count() - 1}" if setup.on_gpus else "cpu"
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0" if setup.on_gpus else "cpu")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=there)
    return num_bytes / seconds(lambda: target.copy_(source), source.device, capture=False)


def main() -> int:
    """Measures what was asked for; the exit code says whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports", default=",".join(AVAILABLE), help="which, by name; those that are not here are named"
    )
    parser.add_argument("--programs", default="", help="numbers of programs to compare, such as 16,32,64,132")
    parser.add_argument(
        "--cuts", help=f"names of ways to compare, separated by semicolons; by default all: {'; '.join(SHAPES)}"
    )
    parser.add_argument("--repeats", type=int, help="writes of each kind")
    parser.add_argument("--quick", action="store_true", help="pools in host memory: tries the program")
    parser.add_argument("--results", type=Path, help="folder for the JSON, in place of bench/results")
    arguments = parser.parse_args()
    if not arguments.quick:
        require("cuda:0", "cuda:1")
    setup = HOST if arguments.quick else GPUS
    setup = setup if arguments.repeats is None else replace(setup, repeats=arguments.repeats)
    names = list(SHAPES) if arguments.cuts is None else arguments.cuts.split(";")
    if unknown := {name.strip() for name in names} - set(SHAPES):
        parser.error(f"no cut is called {', '.join(sorted(unknown))}; there are {'; '.join(SHAPES)}")
    report = Report("transfer") if arguments.results is None else Report("transfer", results=arguments.results)
    with report:
        floors: dict[int, float] = {}
        for tokens in setup.tokens:
            floors[tokens] = plain_copy(tokens // BLOCK_TOKENS * setup.block_bytes, setup) / 1e9
            report.note(f"plain copy, {tokens} tokens", f"{floors[tokens]:.0f} GB/s")
        for name in filter(None, arguments.transports.split(",")):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
                tell(report, name, own.submit(measure, name, setup).result(), floors, setup)
        if arguments.programs:
            programs = [int(number) for number in arguments.programs.split(",")]
            compare(report, setup, programs, [name.strip() for name in names])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
