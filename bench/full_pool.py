"""Attention over a pool that fills the GPU, its requests' blocks strewn all over it, beside blocks in a row.

    python bench/full_pool.py --json full_pool.json               # one GPU
    TRITON_INTERPRET=1 python bench/full_pool.py --quick          # no GPU: tries the logic, tells nothing of speed

The pool is that of an 8B model in bfloat16, all its layers, in as much memory as is free. A decode's figure is the KV
that it reads a second, as a ratio to a plain copy in the same run; a prompt's is operations a second, as a ratio to a
matrix product: of a whole prompt at once, and of its last 1,024 tokens. Each point's last request is held to float64,
which also says that blocks past the first 2 Gi elements are found. Points that the pool has no room for are named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ceilings import ModelShape, copy_bytes_s, matrix_flops
from gpu_timing import seconds
from gpus import require
from paceline import kernels
from paceline.kernels.paged_plan import PagedPlan, plan_pages
from paceline.types import BLOCK_TOKENS, blocks_for

BATCHES: Final = (32, 64, 128)
CONTEXTS: Final = (512, 2_048, 8_192)
PROMPTS: Final = (4_096, 32_768)
CHUNK: Final = 1_024
SPARE_BYTES: Final = 6 * 2**30
"""What stays free of the GPU beside the pool: for a prompt's inputs and outputs, and for float64."""
PROMPT_LAYERS: Final = 4
"""A prompt's attention finds nothing in a cache that the layer before has left: a few layers are enough."""
OVERLAPPING_ROWS: Final = 64
"""Up to so many requests the kernels of an 8B model's decode overlap: docs/decisions/overlapping-kernels.md."""
MOST_ERROR: Final = 1e-2
"""Of a result's norm, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point. `rate` is bytes or operations a second, `share` the ratio to what the hardware does."""

    kind: str
    batch: int
    tokens: int
    table: str
    us: float  # of one layer
    rate: float
    share: float
    error: float

    @property
    def text(self) -> str:
        """A line of the table."""
        unit = "TB/s" if self.kind == "decode" else "TFLOP/s"
        wrong = "" if self.error < MOST_ERROR else f"  WRONG by {self.error:.1e}"
        return (
            f"{self.kind:12} batch {self.batch:4} tokens {self.tokens:6} {self.table:8} {self.us:10.1f} us a layer  "
            f"{self.rate / 1e12:7.2f} {unit:7} {self.share:5.2f} of the ceiling{wrong}"
        )


class FullPool:
    """A pool of noise, and what was measured over it."""

    def __init__(self, shape: ModelShape, blocks: int, device: torch.device, copy: float, flops: float) -> None:
        self._shape, self._copy, self._flops = shape, copy, flops
        size = (blocks, shape.kv_heads, shape.layers, 2, BLOCK_TOKENS, shape.head_dim)
        self.pool = torch.empty(size, dtype=torch.bfloat16, device=device)
        for first in range(0, blocks, 256):  # little at a time: not all of torch's kernels count past 2 Gi elements
            self.pool[first : first + 256].normal_()
        self.rows: list[Row] = []

    def decode(self, batch: int, context: int) -> None:
        """A token each of so many requests, over either kind of table."""
        nbytes = 2 * batch * context * self._shape.kv_heads * self._shape.head_dim * self.pool.element_size()
        self._measure("decode", [context - 1] * batch, [1] * batch, self._shape.layers, nbytes, self._copy)

    def prefill(self, tokens: int, chunk: int) -> None:
        """The last `chunk` tokens of one prompt."""
        start = tokens - chunk
        seen = chunk * start + chunk * (chunk + 1) / 2
        work = 4 * self._shape.heads * self._shape.head_dim * seen
        kind = "whole prompt" if start == 0 else "last chunk"
        self._measure(kind, [start], [chunk], min(PROMPT_LAYERS, self._shape.layers), work, self._flops)

    def _measure(
        self, kind: str, starts: Sequence[int], lengths: Sequence[int], layers: int, work: float, ceiling: float
    ) -> None:
        batch, tokens = len(starts), starts[0] + lengths[0]
        blocks = batch * blocks_for(tokens)
        if blocks > self.pool.shape[0]:
            print(f"{kind:12} batch {batch:4} tokens {tokens:6} takes {blocks} blocks of {self.pool.shape[0]}")
            return
        heads = self._shape.heads + 2 * self._shape.kv_heads
        qkv = torch.randn(sum(lengths), heads, self._shape.head_dim, device=self.pool.device).to(self.pool.dtype)
        strewn = torch.randperm(self.pool.shape[0])[:blocks]
        for name, table in (("random", strewn), ("in a row", torch.arange(blocks))):
            plan = plan_pages(starts, lengths, table.view(batch, -1).tolist(), self.pool)
            with kernels.overlapping(kind == "decode" and batch <= OVERLAPPING_ROWS):
                took = seconds(partial(self._attend, qkv, plan, layers), self.pool.device, repeats=7) / layers
            error = self._error(qkv, plan, layers - 1)
            rate = work / took
            self.rows.append(Row(kind, batch, tokens, name, 1e6 * took, rate, rate / ceiling, error))
            print(self.rows[-1].text, flush=True)

    def _attend(self, qkv: Tensor, plan: PagedPlan, layers: int) -> None:
        for layer in range(layers):
            kernels.attention(qkv, self.pool, layer, plan)

    def _error(self, qkv: Tensor, plan: PagedPlan, layer: int) -> float:
        """How far the last row is from float64, of its norm."""
        found = kernels.attention(qkv, self.pool, layer, plan)[-1].double()
        wanted = exact(qkv[-1, : self._shape.heads], self.pool, plan, layer)
        return float((found - wanted).norm() / wanted.norm())


def exact(queries: Tensor, pool: Tensor, plan: PagedPlan, layer: int) -> Tensor:
    """In float64 the attention of the last request's last token, `queries` [heads, dim] -> [heads * dim]."""
    _, kv_heads, _, _, block_tokens, head_dim = pool.shape
    context = int(plan.contexts[-1])
    table = plan.tables[-1, : -(-context // block_tokens)].long()
    held = pool[:, :, layer][table].double()  # [blocks, kv_heads, 2, block_tokens, dim]
    k, v = (held[:, :, part].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :context] for part in (0, 1))
    q = queries.double().view(kv_heads, -1, head_dim)
    found: Tensor = (q @ k.transpose(1, 2) * head_dim**-0.5).softmax(-1) @ v
    return found.reshape(-1)


def blocks_that_fit(shape: ModelShape, device: torch.device, gib: float | None) -> int:
    """Blocks in `gib` GiB, or in what is free but for SPARE_BYTES."""
    block_bytes = math.prod((shape.kv_heads, shape.layers, 2, BLOCK_TOKENS, shape.head_dim)) * 2
    if gib is not None:
        return int(gib * 2**30 // block_bytes)
    torch.cuda.empty_cache()
    return (torch.cuda.mem_get_info(device)[0] - SPARE_BYTES) // block_bytes


def main() -> int:
    """Measures, prints, writes JSON; the exit code says whether every result was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--pool-gib", type=float, help="of the pool; by default all that is free")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, interpreted: tries the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require("cpu" if args.quick else args.device)
    torch.manual_seed(0)
    device = torch.device("cpu" if args.quick else args.device)
    shape = ModelShape(heads=4, kv_heads=2, head_dim=16, layers=2) if args.quick else ModelShape()
    if args.quick:
        args.batches, args.contexts, args.prompts, chunk, blocks = [2, 9], [40], [48], 20, 12
    else:
        torch.cuda.set_device(device)
        chunk = CHUNK
    copy, flops = copy_bytes_s(device, 2**20 if args.quick else 2**31), matrix_flops(device, 64 if args.quick else 8192)
    if not args.quick:
        blocks = blocks_that_fit(shape, device, args.pool_gib)
    bench = FullPool(shape, blocks, device, copy, flops)
    print(
        f"copy {copy / 1e12:.2f} TB/s, matrix product {flops / 1e12:.0f} TFLOP/s, pool of {blocks} blocks, "
        f"{bench.pool.numel() * 2 / 2**30:.1f} GiB",
        flush=True,
    )
    points: list[Callable[[], None]] = [
        partial(bench.decode, batch, context) for context in args.contexts for batch in args.batches
    ]
    points += [partial(bench.prefill, tokens, part) for tokens in args.prompts for part in (tokens, chunk)]
    with torch.inference_mode(), kernels.forced(kernels.Backend.TRITON):
        for measure in points:
            measure()
            torch.cuda.empty_cache()  # which else keeps what a point worked with for that point's stream
    wrong = sum(not row.error < MOST_ERROR for row in bench.rows)
    print(f"{wrong} of {len(bench.rows)} points are wrong")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in bench.rows]
        args.json.write_text(json.dumps({"copy": copy, "flops": flops, "blocks": blocks, "rows": rows}, indent=1))
    return 1 if wrong or not bench.rows else 0


if __name__ == "__main__":
    sys.exit(main())
