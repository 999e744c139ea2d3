"""How near a kernel must come to float64, and which cases its tests try."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.testing.cover import Case, every, pairwise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the value plus the mean magnitude


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest deviation, as a multiple of what `found`'s type allows; NaN counts as infinitely far."""
    wanted = wanted.double()
    room = _TOLERANCE[found.dtype] * (wanted.abs() + wanted.abs().mean() + 1e-6)
    return float(((found.double() - wanted).abs() / room).nan_to_num(torch.inf, torch.inf).max())


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """`found` has the shape of `wanted`, and its values within what its type allows."""
    assert found.shape == wanted.shape
    assert error(found, wanted) <= 1.0


def cases(parameters: Mapping[str, Sequence[Any]]) -> Any:
    """A mark that runs a test with `case` set to each combination: all pairs, or with KERNEL_COVER=all all of them."""
    chosen = every(parameters) if os.environ.get("KERNEL_COVER") == "all" else pairwise(parameters)
    return pytest.mark.parametrize("case", chosen, ids=_name)


def _name(case: Case) -> str:
    return ",".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case.items())
