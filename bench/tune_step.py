"""A decode step's kernels alone, an 8B model's 32 layers in one graph: what overlapping them, and other products, save.

python bench/tune_step.py --json step.json

Every variant's result is compared with that of the first, which overlaps nothing: with equal products to the bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ceilings import TINY, ModelShape, ModelWeights, copy_bytes_s
from gpu_timing import seconds
from gpus import require
from paceline import kernels
from paceline.kernels.linear_shapes import stream_shape
from paceline.kernels.modes import overlapping
from paceline.kernels.skinny_linear import stream_weights

Product = Callable[[Tensor, Tensor], Tensor]
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A variant's time."""

    batch: int
    context: int
    variant: str
    ms: float
    floor_ms: float
    difference: float

    @property
    def text(self) -> str:
        """A line of the table."""
        return (
            f"batch {self.batch:4} context {self.context:5} {self.variant:24} {self.ms:7.3f} ms, bytes "
            f"{self.floor_ms:6.3f}, ratio {self.ms / self.floor_ms:.3f}  differs by {self.difference:.1e}"
        )


class Step:
    """A batch's inputs, and the pool that they are read from."""

    def __init__(self, model: ModelWeights, pool: Tensor, batch: int, context: int) -> None:
        self.model, self.pool = model, pool
        shape, device = model.shape, pool.device
        self.batch, self.context = batch, context
        blocks = -(-context // BLOCK)
        tables = torch.randperm(pool.shape[0])[: batch * blocks].view(batch, blocks)
        self.plan = kernels.plan_attention([context - 1] * batch, [1] * batch, tables.tolist(), pool)
        slots = tables[:, -1] * BLOCK + (context - 1) % BLOCK
        self.rows = kernels.store_rows(slots.to(device), pool)
        cos, sin = kernels.rope_tables(shape.head_dim, context, 5e5, device)
        self.cos, self.sin = (each[-1:].expand(batch, -1).contiguous() for each in (cos, sin))
        self.hidden = torch.randn(batch, shape.hidden, device=device).to(pool.dtype)
        self.norm = torch.ones(shape.hidden, dtype=pool.dtype, device=device)
        self.temperature = torch.zeros(batch, dtype=torch.float64, device=device)
        self.keys = torch.zeros(batch, dtype=torch.int64, device=device)

    def run(self, multiply: Product) -> Tensor:
        """Logits; sampled from, as in a step."""
        shape = self.model.shape
        residual = self.hidden.clone()
        hidden = kernels.rms_norm(residual, self.norm, 1e-5)
        for index, layer in enumerate(self.model.layers):
            qkv = multiply(hidden, layer["qkv"]).view(self.batch, -1, shape.head_dim)
            kernels.rope_and_store(qkv, self.cos, self.sin, self.rows, self.pool, index)
            hidden = multiply(kernels.attention(qkv, self.pool, index, self.plan), layer["o"])
            hidden = kernels.add_rms_norm(hidden, residual, self.norm, 1e-5)
            hidden = multiply(kernels.swiglu(multiply(hidden, layer["gate_up"])), layer["down"])
            hidden = kernels.add_rms_norm(hidden, residual, self.norm, 1e-5)
        logits = multiply(hidden, self.model.head)
        kernels.sample_rows(logits, self.temperature, None, None, self.keys)
        return logits

    @property
    def nbytes(self) -> int:
        """Read at least: weights and KV."""
        shape = self.model.shape
        kv = self.batch * self.context * shape.layers * shape.kv_heads * shape.head_dim * 2
        return 2 * (shape.weights + kv)


def by_streaming(x: Tensor, weight: Tensor) -> Tensor:
    """Products as sizes get them that were not measured."""
    outputs, inputs = weight.shape
    shape = stream_shape(x.shape[0], outputs, inputs, x.element_size())
    return stream_weights(x, weight, None, shape) if x.shape[0] <= 16 else F.linear(x, weight)


def main() -> None:
    """Measures, compares, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 16, 64, 128))
    parser.add_argument("--contexts", type=int, nargs="*", default=(512, 2048))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to try the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require(args.device)
    torch.manual_seed(0)
    device = torch.device(args.device)
    bandwidth = copy_bytes_s(device, 2**20 if args.quick else 2**31)
    model = ModelWeights.random(TINY if args.quick else ModelShape(), device)
    shape = model.shape
    blocks = max(args.batches) * -(-max(args.contexts) // BLOCK)
    size = (blocks, shape.kv_heads, shape.layers, 2, BLOCK, shape.head_dim)
    pool = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
    found: list[Found] = []
    with kernels.forced(kernels.Backend.TRITON):
        for batch in args.batches:
            for context in args.contexts:
                step = Step(model, pool, batch, context)
                variants: list[tuple[str, bool, Product]] = [
                    ("one after the other", False, kernels.linear),
                    ("overlapping", True, kernels.linear),
                    ("streaming, overlapping", True, by_streaming),
                    ("cuBLAS, overlapping", True, F.linear),
                ]
                with overlapping(False):
                    usual = step.run(kernels.linear).double()
                for name, on, multiply in variants:
                    results: list[Tensor] = []
                    with overlapping(on):
                        took = seconds(lambda: results.append(step.run(multiply)), device, repeats=10)  # noqa: B023
                    # What was captured last holds what was replayed last.
                    apart = float((results[-1].double() - usual).norm() / usual.norm())
                    floor = step.nbytes / bandwidth
                    found.append(Found(batch, context, name, 1e3 * took, 1e3 * floor, apart))
                    print(found[-1].text, flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
