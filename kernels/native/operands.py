"""What the C kernels take: contiguous tensors of a CPU, in float32 or bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def supported(first: Tensor, *others: Tensor | None) -> bool:
    """True where all that are there are contiguous and of one dtype that C knows."""
    dtype = first.dtype
    if (dtype is not torch.float32 and dtype is not torch.bfloat16) or not first.is_contiguous():
        return False
    for other in others:  # noqa: SIM110 asked some 200 times a step, where a generator shows
        if other is not None and (other.dtype is not dtype or not other.is_contiguous()):
            return False
    return True


def is_bfloat16(tensor: Tensor) -> int:
    """The `kind` of an operand."""
    return int(tensor.dtype is torch.bfloat16)
