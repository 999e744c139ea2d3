"""The dense product in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`. [tokens, inputs], [outputs, inputs], [outputs] -> [tokens, outputs]."""
    return F.linear(x, weight, bias)
