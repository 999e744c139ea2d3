"""Ways to cut up the copy of `cuda_ipc`, timed against each other, and which is best."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import torch

from gpu_timing import seconds
from paceline.kernels import ScatterCut
from transfer_pair import Setup, Target, Writer

SHAPES: Final = {
    "small pieces": ScatterCut(piece_bytes=32768),
    "pieces": ScatterCut(piece_bytes=2**18),
    "pieces, 2 stages": ScatterCut(piece_bytes=2**18, stages=2),
    "pieces, 3 stages": ScatterCut(piece_bytes=2**18, stages=3),
    "pieces, streaming": ScatterCut(piece_bytes=2**18, streaming=True),
    "pieces, 64 KiB": ScatterCut(piece_bytes=2**18, chunk_bytes=65536),
    "blocks, 3 stages": ScatterCut(piece_bytes=2**21, stages=3),
}
"""What is compared, by name, each with every number of programs. The first is what came before pieces."""
BESIDE: Final = 1.02
"""Most that a matrix product beside a copy may take, of what it takes beside the copy as it is."""
ALIKE: Final = 0.99
"""Of the fastest rate: what reaches it is as good, and the fewest programs decide."""


@dataclass(frozen=True)
class Point:
    """One way. Rates in GB/s as a writer sees them, of the longest prompt."""

    name: str
    cut: ScatterCut
    run: float
    churned: float
    beside_s: float  # of a matrix product beside the copy
    wrong: int  # blocks

    def __str__(self) -> str:
        wrong = f"; {self.wrong} blocks WRONG" if self.wrong else ""
        return (
            f"run {self.run:.0f} GB/s, churned {self.churned:.0f} GB/s; "
            f"the matrix product beside it {1e3 * self.beside_s:.3f} ms{wrong}"
        )


def sweep(setup: Setup, programs: Sequence[int], names: Sequence[str]) -> tuple[float, list[Point]]:
    """Seconds of the matrix product alone, and every way's point: the copy as it is first."""
    size, device = (8192, torch.device("cuda:0")) if setup.on_gpus else (32, torch.device("cpu"))
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> object:
        return torch.mm(left, right, out=product)

    cuts = {"as it is": ScatterCut()}
    for number in programs:
        cuts |= {f"{name}, {number} programs": replace(SHAPES[name], programs=number) for name in names}
    alone = seconds(multiply, device, capture=False)
    run, churned = (setup.pieces(max(setup.tokens), churned=each) for each in (False, True))
    points = []
    with closing(Target("cuda_ipc", setup)) as target, closing(Writer("cuda_ipc", target, setup)) as writer:
        for name, cut in cuts.items():
            writer.cut(cut)
            rate_of_run = writer.write(run).gigabytes_per_second
            writer.renew()
            rate_of_churned = writer.write(churned).gigabytes_per_second
            wrong = writer.wrong(churned)
            writer.keep_writing(churned, 10)
            beside = seconds(multiply, device, capture=False)
            writer.finish(10)
            points.append(Point(name, cut, rate_of_run, rate_of_churned, beside, wrong))
    return alone, points


def best(points: Sequence[Point]) -> Point:
    """The one to use: of those that are right and leave a product beside them its speed, among the fastest on a churned
    pool the one with the fewest programs. The first point is the copy as it is, and is used where no other may be.
    """
    usual = points[0]
    allowed = [point for point in points if not point.wrong and point.beside_s <= BESIDE * usual.beside_s] or [usual]
    fastest = max(point.churned for point in allowed)
    alike = [point for point in allowed if point.churned >= ALIKE * fastest]
    return min(alike, key=lambda point: (point.cut.programs, -point.churned))
