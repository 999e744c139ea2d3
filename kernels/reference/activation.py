"""Gated activations in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves. [tokens, 2 * intermediate] -> [tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, gelu in its tanh form. [tokens, 2 * intermediate] -> [tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
