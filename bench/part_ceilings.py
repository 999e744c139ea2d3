"""How much the parts of one GPU do side by side: what `scaling.py --parts` may expect of workers that have one each.

    python bench/part_ceilings.py --parts 6 --most 4

So many processes, each confined to its part of the multiprocessors, do the same at the same time: a large matrix
product as prefill has, and a product of one row that reads its matrix once, as decode has. Told is what each does, as a
share of what one does alone: less than 1 is what the parts take from each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F

from gpus import require
from mps import Parts
from report import Report
from spawned import Process

SECONDS = 1.0
SIDE = 4096
ROWS_READ = 131_072
"""Of the matrix that is read: 1 GiB, far more than any cache holds."""
PRODUCT = "TFLOP/s of a product"
LEAST_KEPT = 0.9
"""Of its product alone, that each part does beside others: else they are no parts, and runs on them tell nothing."""


def compute(pipe: Connection) -> None:
    """One process: sends TFLOP/s and TB/s, each measured from a moment on that it is told."""
    square, other = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matrix = torch.randn(ROWS_READ, SIDE, device="cuda", dtype=torch.bfloat16)
    row = torch.randn(1, SIDE, device="cuda", dtype=torch.bfloat16)
    calls: tuple[tuple[Callable[[], object], float], ...] = (
        (lambda: square @ other, 2 * SIDE**3),
        (lambda: F.linear(row, matrix), 2 * ROWS_READ * SIDE),
    )
    for call, _ in calls:
        call()
    torch.cuda.synchronize()
    pipe.send(torch.cuda.get_device_properties(0).multi_processor_count)
    for call, amount in calls:
        start = pipe.recv()
        while time.monotonic() < start:
            pass
        done = 0
        while time.monotonic() < start + SECONDS:
            for _ in range(4):
                call()
            torch.cuda.synchronize()
            done += 4
        pipe.send(done * amount / (time.monotonic() - start) / 1e12)


def side_by_side(processes: Sequence[Process]) -> list[float]:
    """What each of the processes does of the next thing while all do it."""
    start = time.monotonic() + 0.02
    for each in processes:
        each.tell(start)
    return [each.hear() for each in processes]


def main() -> int:
    """Prints the table; the exit code says whether parts are apart in what they compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=6, help="of the GPU, of which each process has one")
    parser.add_argument("--most", type=int, default=4, help="processes at once")
    arguments = parser.parse_args()
    require("cuda:0")
    report = Report(f"part-ceilings-{arguments.parts}")
    with report, Parts(arguments.parts) as parts:
        os.environ.update(parts.env)
        alone: dict[str, float] = {}
        for count in range(1, arguments.most + 1):
            done = together(count)
            for what, each in done.items():
                before = alone.setdefault(what, each[0])
                kept = statistics.mean(each) / before
                report.note(f"{count} at once: {what}, each", f"{statistics.mean(each):.3g} ({kept:.2f} of one alone)")
                if what.startswith(PRODUCT):
                    report.at_least(f"{count} at once: of a product alone", kept, LEAST_KEPT)
    return report.finish()


def together(count: int) -> dict[str, list[float]]:
    """What each of so many processes did."""
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(compute)) for _ in range(count)]
        multiprocessors = [each.hear() for each in processes]
        return {
            f"{PRODUCT} on {multiprocessors[0]} multiprocessors": side_by_side(processes),
            "TB/s read": side_by_side(processes),
        }


if __name__ == "__main__":
    sys.exit(main())
