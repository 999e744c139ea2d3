"""Compiles every kernel for an H200 on a machine without one: `python -m paceline.testing.compile_only`.

The interpreter runs kernels as Python and accepts what the compiler refuses. Nothing is started here: tensors lie on
the CPU, only their types matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from paceline import kernels
from paceline.kernels import gemv, launch
from paceline.kernels.linear_shapes import GemvShape, stream_shape
from paceline.kernels.paged_plan import PagedPlan
from paceline.kernels.skinny_linear import stream_weights


class _NoDevice:
    """Triton's driver of a GPU that isn't there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _attention(dtype: torch.dtype, head_dim: int) -> None:
    for group in (1, 7):
        pool = torch.zeros(3, 2, 1, 2, 16, head_dim, dtype=dtype)
        qkv = torch.zeros(21, 2 * group + 4, head_dim, dtype=dtype)
        for window in (None, 8):
            plan = kernels.plan_attention([0, 0], [1, 20], [[1], [1, 2]], pool, window)
            assert isinstance(plan, PagedPlan)
            kernels.attention(qkv, pool, 0, replace(plan, few=9, splits=1))
            kernels.attention(qkv, pool, 0, replace(plan, splits=5))
            kernels.set_batch_invariant(True)
            kernels.attention(qkv, pool, 0, plan)
            kernels.set_batch_invariant(False)


def _others(dtype: torch.dtype, head_dim: int) -> None:
    pool = torch.zeros(3, 2, 1, 2, 16, head_dim, dtype=dtype)
    qkv = torch.zeros(2, 12, head_dim, dtype=dtype)
    weight = torch.ones(head_dim, dtype=dtype)
    cos, sin = kernels.rope_tables(head_dim, 2, 1e4)
    rows = kernels.store_rows(torch.arange(2), pool)
    kernels.rope_and_store(qkv, cos, sin, rows, pool, 0)
    kernels.qk_norm(qkv, 2, weight, weight, 1e-6)
    kernels.copy_blocks(pool, torch.tensor([1]), torch.tensor([2]))
    x = torch.zeros(2, 4096, dtype=dtype)
    kernels.rms_norm(x, x[0], 1e-5)
    kernels.add_rms_norm(x, x.clone(), x[0], 1e-5)
    kernels.swiglu(x)
    kernels.geglu(x)
    for rows_ in (1, 3):
        for inputs in (100, 4096):
            few = torch.zeros(rows_, inputs, dtype=dtype)
            gemv.multiply(few, torch.zeros(200, inputs, dtype=dtype), None, GemvShape(4, 1024, 8))
    kernels.set_batch_invariant(True)
    for rows_ in (1, 100):
        kernels.linear(torch.zeros(rows_, 4096, dtype=dtype), torch.zeros(200, 4096, dtype=dtype))
    kernels.set_batch_invariant(False)
    for rows_ in (1, 144):
        for inputs in (100, 4096):
            shape = stream_shape(rows_, 200, inputs, dtype.itemsize)
            stream_weights(torch.zeros(rows_, inputs, dtype=dtype), torch.zeros(200, inputs, dtype=dtype), None, shape)


def _sampling() -> None:
    number = torch.arange(2)
    ones = torch.ones(2).double()
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(2, 9000, dtype=dtype)
        kernels.sample_rows(logits, ones, number, ones, number)
        kernels.sample_rows(logits, ones, None, None, number)
    kernels.sample_rows(torch.zeros(2, 1), ones.float(), number.int(), None, number)


def _scatter() -> None:
    for cut in (kernels.ScatterCut(), kernels.ScatterCut(stages=3, streaming=True), kernels.ScatterCut(stages=2)):
        kernels.scatter_blocks(torch.zeros(2, 2, dtype=torch.int32), 1 << 40, 1 << 41, 2 << 20, cut)


def pretend() -> None:
    """From now on this process compiles for an H200 whatever it is told to launch, and launches nothing."""
    driver.set_active(_NoDevice())
    launch.compute_capability = lambda device: (9, 0)  # type: ignore[assignment]
    run: Any = JITFunction.run
    JITFunction.run = partialmethod(lambda self, *args, **options: run(self, *args, **{**options, "warmup": True}))


def main() -> None:
    """Compiles all, or raises what the compiler says."""
    pretend()
    with kernels.forced(kernels.Backend.TRITON):
        _sampling()
        _scatter()
        for dtype, head_dim, overlap in (
            (torch.bfloat16, 128, True),
            (torch.bfloat16, 128, False),
            (torch.float32, 80, True),
            (torch.bfloat16, 16, True),
        ):
            with kernels.overlapping(overlap):
                _others(dtype, head_dim)
                _attention(dtype, head_dim)


if __name__ == "__main__":
    main()
