"""What the hardware gives, measured anew: every other benchmark's figures are ratios to these, of the same run.

python bench/ceilings.py --json ceilings.json

Copies, a large matrix product, and cuBLAS's products of whole steps of an 8B model, each layer with weights of its own,
so that none is found in a cache. Other benchmarks call `measure`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_timing import seconds
from gpus import require

DECODE_ROWS: Final = (1, 16, 64, 128, 256)
PREFILL_ROWS: Final = (512, 1024, 4096)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama model's products; by default those of Llama 3.1 8B."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    layers: int = 32
    vocab: int = 128256

    @property
    def of_layer(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each product of a layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def weights(self) -> int:
        """Elements that a decode step reads."""
        layer = sum(outputs * inputs for outputs, inputs in self.of_layer.values())
        return self.layers * layer + self.vocab * self.hidden


TINY: Final = ModelShape(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, layers=2, vocab=200)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Random weights of these sizes."""

    shape: ModelShape
    layers: Sequence[Mapping[str, Tensor]]
    head: Tensor

    @classmethod
    def random(cls, shape: ModelShape, device: torch.device) -> ModelWeights:
        """bfloat16, of a size that keeps a product's outputs near 1."""

        def matrix(outputs: int, inputs: int) -> Tensor:
            return torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device).normal_(std=inputs**-0.5)

        layers = [{name: matrix(*size) for name, size in shape.of_layer.items()} for _ in range(shape.layers)]
        return cls(shape, layers, matrix(shape.vocab, shape.hidden))

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Random inputs of each product."""
        sizes = {**{name: inputs for name, (_, inputs) in self.shape.of_layer.items()}, "head": self.shape.hidden}
        head = self.head
        return {name: torch.randn(rows, inputs, device=head.device).to(head.dtype) for name, inputs in sizes.items()}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes a second count what is read and what is written. Steps' products are in seconds, by rows."""

    device: str
    copy_bytes_s: float
    matrix_flops: float
    host_to_device_bytes_s: float  # pinned; of the bytes moved
    device_to_host_bytes_s: float
    peer_bytes_s: float | None  # to the next GPU, of the bytes moved; None: there is none
    decode_s: Mapping[int, float] = field(default_factory=dict)
    decode_parts_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # each product, in all layers
    prefill_s: Mapping[int, float] = field(default_factory=dict)  # without the head
    weight_bytes: int = 0

    @property
    def stream_s(self) -> float:
        """Reading a model's weights once at the speed of a copy."""
        return self.weight_bytes / self.copy_bytes_s

    @property
    def text(self) -> str:
        """A table."""
        lines = [
            f"{self.device}: copy {self.copy_bytes_s / 1e12:.3f} TB/s, product {self.matrix_flops / 1e12:.0f} TFLOP/s, "
            f"host to device {self.host_to_device_bytes_s / 1e9:.1f} GB/s, back "
            f"{self.device_to_host_bytes_s / 1e9:.1f} GB/s, peer "
            + ("none" if self.peer_bytes_s is None else f"{self.peer_bytes_s / 1e9:.0f} GB/s")
        ]
        for rows, found in self.decode_s.items():
            parts = "  ".join(f"{name} {1e3 * of[rows]:.3f}" for name, of in self.decode_parts_s.items())
            lines.append(
                f"decode  {rows:5} rows {1e3 * found:8.3f} ms, {found / self.stream_s:.3f} of the bytes: {parts}"
            )
        lines += [f"prefill {rows:5} rows {1e3 * found:8.3f} ms" for rows, found in self.prefill_s.items()]
        return "\n".join(lines)


def measure(
    device: torch.device,
    shape: ModelShape | None = None,
    *,
    decode_rows: Sequence[int] = DECODE_ROWS,
    prefill_rows: Sequence[int] = PREFILL_ROWS,
    model: ModelWeights | None = None,
    quick: bool = False,
) -> Ceilings:
    """Measures on `device`: about 10 s and 18 GB with the default shape. `model` saves making the weights again."""
    size = 2**20 if quick else 2**31
    copy = copy_bytes_s(device, size)
    flops = matrix_flops(device, 64 if quick else 8192)
    to_device, to_host = host_bytes_s(device, size // 8)
    peer = peer_bytes_s(device, size // 4)
    if model is None:
        model = ModelWeights.random(shape or ModelShape(), device)
    decode: dict[int, float] = {}
    parts: dict[str, dict[int, float]] = {name: {} for name in (*model.shape.of_layer, "head")}
    for rows in decode_rows:
        inputs = model.inputs(rows)
        for name, of in parts.items():
            of[rows] = seconds(partial(_products, model, name, inputs[name]), device)
        decode[rows] = seconds(partial(_step, model, inputs, head=True), device)
    prefill = {
        rows: seconds(partial(_step, model, model.inputs(rows), head=False), device, repeats=5) for rows in prefill_rows
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    nbytes = 2 * model.shape.weights
    return Ceilings(name, copy, flops, to_device, to_host, peer, decode, parts, prefill, nbytes)


def copy_bytes_s(device: torch.device, size: int = 2**31) -> float:
    """Of a large copy on the device, read plus written."""
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, capture=False)  # a graph's copy is another engine's


def matrix_flops(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device)


def host_bytes_s(device: torch.device, size: int) -> tuple[float, float]:
    """(to the device, back) of pinned memory."""
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    forth = seconds(lambda: there.copy_(on_host, non_blocking=True), device, repeats=8, capture=False)
    return size / forth, size / seconds(
        lambda: on_host.copy_(there, non_blocking=True), device, repeats=8, capture=False
    )


def peer_bytes_s(device: torch.device, size: int) -> float | None:
    """Of a copy to the next GPU of the host."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    peer = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
    source, target = (torch.zeros(size, dtype=torch.uint8, device=each) for each in (device, peer))
    return size / seconds(lambda: target.copy_(source, non_blocking=True), device, repeats=8, capture=False)


def _products(model: ModelWeights, name: str, x: Tensor) -> None:
    if name == "head":
        F.linear(x, model.head)
        return
    for layer in model.layers:
        F.linear(x, layer[name])


def _step(model: ModelWeights, inputs: Mapping[str, Tensor], *, head: bool) -> None:
    for layer in model.layers:
        for name, weight in layer.items():
            F.linear(inputs[name], weight)
    if head:
        F.linear(inputs["head"], model.head)


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to try the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require(args.device)
    found = measure(torch.device(args.device), TINY if args.quick else None, quick=args.quick)
    print(found.text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
