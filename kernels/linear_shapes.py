"""How skinny products are cut up. What was measured lies in `linear_table.json`: nothing is tuned while serving.

`bench/tune_linear.py` writes the table, on an H200, for the products of an 8B model in bfloat16.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

from paceline.kernels.launch import INTERPRETED, power_of_two

_TABLE = Path(__file__).with_name("linear_table.json")
_FASTER_ROWS = 16  # of products that were not measured: up to here streaming is no slower than cuBLAS
_PROGRAMS = 264  # two on each of an H200's 132 multiprocessors
_FEWEST_STEPS = 4  # of a piece's loop, or joining costs more than sharing saves


@dataclass(frozen=True, slots=True)
class GemvShape:
    """For the plain arithmetic units."""

    outputs: int  # of a program
    inputs: int  # looked at together
    warps: int


@dataclass(frozen=True, slots=True)
class StreamShape:
    """For the matrix units."""

    rows: int
    tail: int  # rows of the second product, 0: none
    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int
    ahead: int = 2  # steps of the loop whose weights are fetched ahead, where kernels overlap; 0: they do not


def stream_shape(rows: int, outputs: int, inputs: int, element_bytes: int) -> StreamShape:
    """For a product of these sizes that was not measured."""
    wide = power_of_two(rows, 16)
    tail = 0
    if rows > 128:
        wide, tail = 128, power_of_two(rows - 128, 16)
    band = 64
    depth = 128 if element_bytes == 2 and wide <= 64 else 64 if element_bytes == 2 else 32
    bands = triton.cdiv(outputs, band)
    steps = triton.cdiv(inputs, depth)
    splits = max(1, min(_PROGRAMS // bands, steps // _FEWEST_STEPS, 16))
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))  # as many as get something to do
    return StreamShape(wide, tail, band, depth, splits, 4, 1 if INTERPRETED else 4 if element_bytes == 2 else 2)


def choose(rows: int, outputs: int, inputs: int, element_bytes: int) -> GemvShape | StreamShape | None:
    """The fastest way known to compute such a product; None: cuBLAS's."""
    if element_bytes == 2 and not INTERPRETED:
        for most_rows, shape in _measured().get((outputs, inputs), ()):
            if rows <= most_rows:
                return shape
    if rows == 1:
        return GemvShape(256 if INTERPRETED else 4, 2048, 8)  # interpreted, a program costs more than its work
    return stream_shape(rows, outputs, inputs, element_bytes) if rows <= _FASTER_ROWS else None


@cache
def _measured() -> dict[tuple[int, int], list[tuple[int, GemvShape | StreamShape | None]]]:
    """By (outputs, inputs): up to how many rows which shape, fewest rows first."""
    found: dict[tuple[int, int], list[tuple[int, GemvShape | StreamShape | None]]] = {}
    for entry in sorted(json.loads(_TABLE.read_text()), key=lambda entry: int(entry["rows"])):
        found.setdefault((entry["outputs"], entry["inputs"]), []).append((entry["rows"], _shape(entry)))
    return found


def _shape(entry: dict[str, Any]) -> GemvShape | StreamShape | None:
    if entry["kind"] == "cublas":
        return None
    return (GemvShape if entry["kind"] == "gemv" else StreamShape)(**entry["shape"])
