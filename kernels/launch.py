"""What every Triton kernel shares: starting it, and conversions that are right on a GPU and interpreted alike."""

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.modes import kernels_may_overlap

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1 when the process started)."""
_INTERPRETED = tl.constexpr(INTERPRETED)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Starts a kernel on the device and current stream of its first argument, a tensor; an empty grid is no work."""
    if 0 in grid:
        return
    device = args[0].device
    if INTERPRETED:
        # Padding may divide by zero: a GPU's arithmetic warns of nothing, and the interpreter's is to be the same.
        with np.errstate(all="ignore"):
            kernel[grid](*args, **options)
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def overlaps(tensor: Tensor) -> bool:
    """Whether a kernel on this tensor's device may start while the one before it ends: wished for, and from Hopper on.

    One that does calls `wait_for_last` in every program before it reads what others write, or writes anything, and
    before it ends: its own end then says that all before it have ended too.
    """
    return kernels_may_overlap() and compute_capability(tensor.device) >= (9, 0)


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; (0, 0) of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def upcast(tensor: Tensor) -> bool:
    """Whether kernels widen what they load from this tensor before they multiply it.

    Triton's interpreter keeps bfloat16 as 16-bit integers, and its products of them are wrong without a word.
    """
    return INTERPRETED and tensor.dtype == torch.bfloat16


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least both."""
    return max(least, 1 << (max(1, value) - 1).bit_length())


@triton.jit
def start_next(OVERLAP: tl.constexpr) -> None:
    """The next kernel may start once all programs of this one have come here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr) -> None:
    """Until the kernel before this one has ended, and what it wrote can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(at: tl.tensor) -> None:
    """Brings the cache lines that these pointers lie in to the second cache, and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def narrow(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """`x`, float32, in `like`'s element type, rounded to nearest even: interpreted, a conversion would truncate."""
    if _INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - Triton compiles only the branch that it takes, and needs the other to be one
        return x.to(like.dtype.element_ty)
