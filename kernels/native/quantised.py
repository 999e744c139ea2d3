"""Products over weights as a GGUF file has them: what takes the time of a decode step is reading weights.

A float32 matrix keeps its quantised rows beside it, as an attribute, and the C product widens them to the very numbers
that the matrix holds. Whatever else reads the matrix never notices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.kernels.native.library import is_loaded, library

_ENCODINGS: Final = {"Q4_1": (2, 20), "Q8_0": (3, 34)}  # as kernels.c numbers them, and bytes of a block
_ATTRIBUTE: Final = "paceline_quantised"
_BLOCK: Final = 32
_BAND: Final = 8
_MOST_INPUTS: Final = 8192


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows uint8 [outputs, bytes of a row], contiguous."""

    encoding: int
    rows: Tensor


def reads_quantised(weight: Tensor) -> bool:
    """Whether matrices like `weight` gain by having their quantised rows attached."""
    return is_loaded() and weight.device.type == "cpu" and weight.dtype is torch.float32


def attach_quantised(weight: Tensor, encoding: str, rows: Tensor) -> None:
    """From now on products by this very tensor read `rows`, which dequantise to it, if they are such as C reads."""
    outputs, inputs = weight.shape
    fits = inputs % _BLOCK == 0 and inputs <= _MOST_INPUTS and outputs % _BAND == 0
    if fits and encoding in _ENCODINGS:
        number, block_bytes = _ENCODINGS[encoding]
        row_bytes = inputs // _BLOCK * block_bytes
        assert rows.shape == (outputs, row_bytes), f"{encoding} rows {tuple(rows.shape)}, not {outputs} x {row_bytes}"
        setattr(weight, _ATTRIBUTE, Quantised(number, rows.contiguous()))


def quantised_of(weight: Tensor) -> Quantised | None:
    """What was attached."""
    return getattr(weight, _ATTRIBUTE, None)


def nbytes_read(weight: Tensor) -> int:
    """Bytes that a product with few rows reads of `weight`: of its quantised rows, where they are attached."""
    stored = quantised_of(weight)
    return weight.nbytes if stored is None else stored.rows.nbytes


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None, outputs: int) -> Tensor:
    """`x` float32 [rows, inputs] -> [rows, outputs]."""
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    library().quantised_linear(
        x.data_ptr(),
        weight.rows.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        inputs,
        outputs,
        weight.encoding,
    )
    return out
