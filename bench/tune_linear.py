"""Which way to compute a skinny product is fastest, by rows and size, beside cuBLAS; writes the table the kernel reads.

python bench/tune_linear.py --json linear.json

Each product of a layer is timed over the weights of all layers, one after the other, in a captured graph: no weight is
found in a cache, and a product follows the one before as in a decode step. Every candidate is held to float64 first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ceilings import TINY, ModelShape, ModelWeights, copy_bytes_s
from gpu_compile import compile_all
from gpu_timing import seconds
from gpus import require
from paceline.kernels import gemv, skinny_linear
from paceline.kernels.linear_shapes import GemvShape, StreamShape, stream_shape
from paceline.kernels.modes import overlapping

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SHARED_BYTES = 225_000
TOLERANCE = 6e-3  # of bfloat16 results, relative to their norm

Shape = GemvShape | StreamShape


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate's time over all layers."""

    product: str
    rows: int
    outputs: int
    inputs: int
    kind: str
    shape: dict[str, Any]
    us: float  # of one product
    cublas_us: float
    floor_us: float
    error: float

    @property
    def text(self) -> str:
        """A line of the table."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        return (
            f"{self.product:8} {self.rows:4} rows  {self.us:7.2f} us = {self.us / self.floor_us:.3f} of the bytes, "
            f"cuBLAS {self.cublas_us:7.2f} = {self.cublas_us / self.floor_us:.3f}  {self.kind} {shape}"
        )


def gemv_shapes(rows: int, inputs: int) -> Iterator[GemvShape]:
    """Candidates whose accumulators fit into the registers."""
    if rows > gemv.MOST_ROWS:
        return
    for outputs, wide, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096, 16384), (4, 8, 16)):
        a_thread = outputs * wide // (32 * warps)
        if wide < 2 * inputs and a_thread >= 8 and a_thread * max(1, rows) <= 128:
            yield GemvShape(outputs, wide, warps)


def stream_shapes(rows: int, outputs: int, inputs: int, most: int) -> Iterator[StreamShape]:
    """Candidates that fit into shared memory, each with the splits that fill the device once to four times.

    The tiles are the same for every product, as each is a kernel to be compiled; splits are none.
    """
    wide = max(16, rows)
    tiles = [
        (band, depth, warps, stages)
        for band, depth, warps, stages in itertools.product((64, 128, 256), (64, 128, 256), (4, 8), (3, 4, 5, 6))
        if (band + wide) * depth * 2 * stages <= SHARED_BYTES
        and (band + wide) * depth * 2 * stages >= 48_000
        and band * wide <= 64 * 128 * warps // 4
        and band >= 16 * warps
    ]
    for band, depth, warps, stages in random.Random(rows).sample(tiles, min(most, len(tiles))):
        bands, steps = -(-outputs // band), -(-inputs // depth)
        for programs in (132, 264, 528):
            splits = max(1, programs // bands)
            splits = -(-steps // -(-steps // splits))
            if splits == 1 or steps // splits >= 4:
                yield StreamShape(wide, 0, band, depth, splits, warps, stages, 2)


def candidates(rows: int, outputs: int, inputs: int, most: int) -> list[Shape]:
    """At most `most` tiles of each family, at random, and what is used today."""
    few = list(gemv_shapes(rows, inputs))
    today = stream_shape(rows, outputs, inputs, 2)
    chosen: list[Shape] = [today, replace(today, ahead=0)]
    chosen += random.Random(inputs).sample(few, min(most, len(few)))
    return list(dict.fromkeys([*chosen, *stream_shapes(rows, outputs, inputs, most)]))


def call(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    """The product, cut up so."""
    if isinstance(shape, GemvShape):
        return gemv.multiply(x, weight, None, shape)
    return skinny_linear.stream_weights(x, weight, None, shape)


def over_layers(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> None:
    """One product with each layer's weights."""
    for weight in weights:
        run(x, weight)


def tune(
    model: ModelWeights, product: str, rows: int, shapes: Sequence[Shape], bandwidth: float, repeats: int
) -> list[Found]:
    """All candidates' times for a product, fastest first."""
    device = model.head.device
    weights = [model.head] if product == "head" else [layer[product] for layer in model.layers]
    outputs, inputs = weights[0].shape
    x = torch.randn(rows, inputs, device=device).to(weights[0].dtype)
    wanted = x.double() @ weights[-1].double().T
    norm = float(wanted.norm())
    cublas = seconds(partial(over_layers, F.linear, x, weights), device, repeats=repeats) / len(weights)
    nbytes = 2 * (outputs * inputs + rows * (inputs + outputs))
    found = []
    for shape in shapes:
        try:
            result = call(shape, x, weights[-1])
            error = float((result.double() - wanted).norm()) / norm
            if not error < TOLERANCE:
                print(f"  WRONG by {error:.2e}: {product} {rows} rows {shape}")
                continue
            took = seconds(partial(over_layers, partial(call, shape), x, weights), device, repeats=repeats)
        except Exception as failure:  # noqa: BLE001 - the compiler, ptxas and a launch have no common error
            print(f"  fails: {product} {rows} rows {shape}: {str(failure)[:100]}")
            continue
        found.append(
            Found(
                product,
                rows,
                outputs,
                inputs,
                type(shape).__name__,
                asdict(shape),
                1e6 * took / len(weights),
                1e6 * cublas,
                1e6 * nbytes / bandwidth,
                error,
            )
        )
    return sorted(found, key=lambda each: each.us)


def table(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the kernel reads: the fastest way of each product, by rows; cuBLAS's where that is faster.

    A way of ours within 2% of cuBLAS's is taken, as the kernels before and after it overlap with ours alone.
    """
    entries = []
    for product, rows in dict.fromkeys((each["product"], each["rows"]) for each in found):
        of_it = sorted((e for e in found if (e["product"], e["rows"]) == (product, rows)), key=lambda each: each["us"])
        overlapping = [each for each in of_it if each["shape"].get("ahead") != 0]
        best = overlapping[0] if overlapping and overlapping[0]["us"] < 1.01 * of_it[0]["us"] else of_it[0]
        entry = {name: best[name] for name in ("product", "outputs", "inputs", "rows")}
        if best["us"] > 1.02 * best["cublas_us"]:
            entry |= {"kind": "cublas", "us": best["cublas_us"]}
        else:
            kind = "gemv" if best["kind"] == "GemvShape" else "stream"
            entry |= {"kind": kind, "us": best["us"], "shape": best["shape"]}
        entries.append({**entry, "us": round(entry["us"], 2), "cublas_us": round(best["cublas_us"], 2)})
    return sorted(entries, key=lambda each: (each["outputs"], each["inputs"], each["rows"]))


def write_table(found: Sequence[dict[str, Any]], path: Path) -> None:
    """One line an entry."""
    path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in table(found)) + "\n]\n")


@overlapping(True)  # as in the steps that the kernels are cut up for
def main() -> None:
    """Compiles, checks, times; prints the best of each and writes all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--products", nargs="*", default=("qkv", "o", "gate_up", "down", "head"))
    parser.add_argument("--most", type=int, default=24, help="candidates of a family")
    parser.add_argument("--seconds", type=float, default=110, help="time after which no other product is begun")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to try the program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="where to write what the kernel reads")
    parser.add_argument("--measured", type=Path, nargs="*", help="writes the table from these files' points alone")
    args = parser.parse_args()
    if args.measured:
        write_table([point for path in args.measured for point in json.loads(path.read_text())], args.table)
        return
    require(args.device)
    started = time.monotonic()
    device = torch.device(args.device)
    bandwidth = copy_bytes_s(device, 2**20 if args.quick else 2**31)
    model = ModelWeights.random(TINY if args.quick else ModelShape(), device)
    sizes = {**model.shape.of_layer, "head": (model.shape.vocab, model.shape.hidden)}
    work = {
        (product, rows): candidates(rows, *sizes[product], args.most) for rows in args.rows for product in args.products
    }
    if device.type == "cuda":
        todo: list[Callable[[], object]] = []
        for (product, rows), shapes in work.items():
            weight = model.head if product == "head" else model.layers[0][product]
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=device)
            todo += [partial(call, shape, x, weight) for shape in shapes]
        compile_all(todo, device, args.threads)
        print(f"{len(todo)} candidates compiled after {time.monotonic() - started:.0f} s", flush=True)
    everything: list[Found] = []
    for (product, rows), shapes in work.items():
        if time.monotonic() - started > args.seconds:
            print(f"out of time before {product} with {rows} rows")
            break
        found = tune(model, product, rows, shapes, bandwidth, 3 if args.quick else 5)
        everything += found
        for best in found[:2]:
            print(best.text, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in everything]))
    if args.table:
        write_table([asdict(each) for each in everything], args.table)
    for rows in args.rows:
        of_rows = [each for each in everything if each.rows == rows]
        winners = {each.product: each for each in reversed(of_rows)}
        times, cublas, floors = [], [], []
        for name, each in winners.items():
            count = 1 if name == "head" else model.shape.layers
            times.append(count * min(each.us, each.cublas_us))
            cublas.append(count * each.cublas_us)
            floors.append(count * each.floor_us)
        print(
            f"{rows:4} rows: best {sum(times) / 1e3:.3f} ms, cuBLAS {sum(cublas) / 1e3:.3f} ms, "
            f"bytes {sum(floors) / 1e3:.3f} ms, ratio {sum(times) / max(1e-9, sum(floors)):.3f}"
        )


if __name__ == "__main__":
    main()
