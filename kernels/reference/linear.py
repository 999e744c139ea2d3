"""The dense product in plain torch."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

MANY_ROWS: Final = 64
"""Rows from which widening a bfloat16 weight is the lesser part of a product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`. [tokens, inputs], [outputs, inputs], [outputs] -> [tokens, outputs]."""
    if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and len(x) >= MANY_ROWS and not _has_tiles():
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    return F.linear(x, weight, bias)


@cache
def _has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in tiles (AMX), faster than float32 ones.

    Those that merely have instructions for bfloat16 vectors take up to 1.8 times as long as in float32.
    """
    return bool(torch.cpu._is_amx_tile_supported())
