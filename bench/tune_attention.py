"""How to cut up decode attention, by batch and context: tiles and splits, as a ratio to reading the KV once.

python bench/tune_attention.py --json attention.json

Each point is a captured graph over all layers of an 8B model's pool, with random block tables, so that nothing is found
in a cache; every candidate is held to the first one's result, and that to float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ceilings import copy_bytes_s
from gpu_compile import compile_all
from gpu_timing import seconds
from gpus import require
from paceline.kernels.attention_decode import decode_attention
from paceline.kernels.attention_tile import TileShape, tile_shape
from paceline.kernels.modes import overlapping
from paceline.kernels.paged_plan import PagedPlan, plan_pages

POINTS = ((1, 512), (1, 2048), (64, 512), (16, 512), (16, 2048), (64, 2048), (1, 8192))
MORE = ((256, 512), (128, 2048), (4, 1024))
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate at a point."""

    batch: int
    context: int
    shape: dict[str, int]
    splits: int
    us: float  # of one layer
    floor_us: float

    @property
    def text(self) -> str:
        """A line of the table."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        return (
            f"batch {self.batch:4} context {self.context:5}  {self.us:7.2f} us, bytes {self.floor_us:7.2f}, ratio "
            f"{self.us / self.floor_us:6.3f}  splits {self.splits:3} {shape}"
        )


def shapes() -> Iterator[TileShape]:
    """Tiles to try."""
    for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
        if keys * HEAD_DIM * 4 * stages <= 110_000 and keys >= 16 * warps:
            yield TileShape(16, keys, warps, stages)


def splits_of(batch: int, context: int) -> list[int]:
    """Splits to try: enough programs, and no empty ones."""
    return [
        splits
        for splits in (1, 2, 4, 8, 16, 32, 64)
        if splits <= max(1, context // 64) and (64 <= batch * KV_HEADS * splits <= 4500 or splits == 1)
    ]


def plan_of(batch: int, context: int, pool: Tensor) -> PagedPlan:
    """Decodes of so many requests, in blocks strewn over the pool."""
    blocks = -(-context // BLOCK)
    table = torch.randperm(pool.shape[0])[: batch * blocks].view(batch, blocks).tolist()
    return plan_pages([context - 1] * batch, [1] * batch, table, pool)


def attend(qkv: Tensor, pool: Tensor, plan: PagedPlan, shape: TileShape, layers: int) -> Tensor:
    """All layers', the last one's result."""
    out = torch.empty(qkv.shape[0], HEADS * HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
    for layer in range(layers):
        decode_attention(qkv, pool, layer, plan, HEAD_DIM**-0.5 * math.log2(math.e), out, shape)
    return out


def exact(qkv: Tensor, pool: Tensor, plan: PagedPlan, layer: int) -> Tensor:
    """The first request's attention in float64, [heads * head_dim]."""
    context = int(plan.contexts[0])
    held = pool[plan.tables[0, : -(-context // BLOCK)].long(), :, layer].double()  # [blocks, kv_heads, 2, 16, dim]
    k, v = (held[:, :, part].transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :context] for part in (0, 1))
    q = qkv[0, :HEADS].double().view(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    found: Tensor = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1) @ v
    return found.reshape(-1)


def tune(batch: int, context: int, pool: Tensor, bandwidth: float) -> list[Found]:
    """All candidates at a point, fastest first."""
    layers = pool.shape[2]
    plan = plan_of(batch, context, pool)
    qkv = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM, device=pool.device).to(pool.dtype)
    nbytes = batch * context * KV_HEADS * HEAD_DIM * 2 * pool.element_size()
    wanted = exact(qkv, pool, plan, layers - 1)
    usual = tile_shape(16, pool)
    found = []
    for shape, splits in itertools.product(
        [usual, *shapes()], dict.fromkeys([plan.splits, *splits_of(batch, context)])
    ):
        cut = replace(plan, splits=splits)
        try:
            result = attend(qkv, pool, cut, shape, layers)[0].double()
            error = float((result - wanted).norm() / wanted.norm())
            if not error < 1e-2:
                print(f"  WRONG by {error:.2e}: {batch} {context} {shape} {splits} splits")
                continue
            took = seconds(partial(attend, qkv, pool, cut, shape, layers), pool.device, repeats=3)
        except Exception as failure:  # noqa: BLE001 - the compiler, ptxas and a launch have no common error
            print(f"  fails: {shape} {splits} splits: {str(failure)[:100]}")
            continue
        found.append(Found(batch, context, asdict(shape), splits, 1e6 * took / layers, 1e6 * nbytes / bandwidth))
    print(f"{found[0].text}  (as it is)", flush=True)
    return sorted(found, key=lambda each: each.us)


@overlapping(True)  # as in the steps that the kernels are cut up for
def main() -> None:
    """Compiles, checks, times; prints the best of each point and writes all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=100, help="time after which no other point is begun")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="one tiny point: to try the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require(args.device)
    started = time.monotonic()
    device = torch.device(args.device)
    points = ((2, 130),) if args.quick else POINTS + MORE
    blocks = max(batch * -(-context // BLOCK) for batch, context in points)
    bandwidth = copy_bytes_s(device, 2**20 if args.quick else 2**31)
    layers = 1 if args.quick else args.layers
    pool = torch.empty(blocks, KV_HEADS, layers, 2, BLOCK, HEAD_DIM, dtype=torch.bfloat16, device=device).normal_()
    if device.type == "cuda":
        work: list[Callable[[], object]] = []
        for splits in (1, 2, 4, 8, 16, 32, 64):
            plan = replace(plan_of(2, 512, pool), splits=splits)
            qkv = torch.zeros(2, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=pool.dtype, device=device)
            work += [partial(attend, qkv, pool, plan, shape, 1) for shape in [tile_shape(16, pool), *shapes()]]
        compile_all(work, device, args.threads)
        print(f"{len(work)} candidates compiled after {time.monotonic() - started:.0f} s", flush=True)
    everything: list[Found] = []
    for batch, context in points:
        if time.monotonic() - started > args.seconds:
            print(f"out of time before batch {batch} context {context}")
            break
        found = tune(batch, context, pool, bandwidth)
        everything += found
        for best in found[:3]:
            print(best.text, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in everything]))


if __name__ == "__main__":
    main()
