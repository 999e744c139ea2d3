"""The seam between a checkpoint's files and whoever loads them: named tensors in Hugging Face's names and layout."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError


class TensorInfo(msgspec.Struct, frozen=True):
    """One stored tensor. `shape` is row-major, outermost first; `encoding` is the file's own name for its type."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int


class HostTensor(msgspec.Struct, frozen=True):
    """A tensor's values in host memory: float32 or float16, or bfloat16's bits in uint16, since numpy has no bfloat16.

    The array may be a view of the mapped file: it is valid while the `Tensors` it came from is open.
    """

    array: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
    is_bfloat16: bool = False


class QuantisedRows(msgspec.Struct, frozen=True):
    """A matrix as its file has it: `encoding` is that of `TensorInfo`, and `rows` [rows, bytes of a row] a copy."""

    encoding: str
    rows: NDArray[np.uint8]


class Tensors(Protocol):
    """The tensors of one checkpoint. Not for two threads at once. Methods raise `CheckpointError`."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`."""

    def read(self, name: str) -> HostTensor:
        """The values, in Hugging Face's row order; `name` is a key of `infos`."""

    def quantised(self, name: str) -> QuantisedRows | None:
        """What `read` dequantises, in the same order of rows; None where rows are not quantised each by itself."""

    def stored(self, name: str) -> memoryview:
        """The bytes as they lie in the file; release it before `close`."""

    def close(self) -> None:
        """Unmaps the files."""


def map_file(path: Path) -> mmap.mmap:
    """The whole file mapped copy-on-write, or `CheckpointError`.

    Copy-on-write and not read-only: torch warns about tensors over read-only memory. Nothing ever writes.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # mmap refuses a length of 0
        raise CheckpointError(f"{path}: the file is empty") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def unmap(mapped: mmap.mmap) -> None:
    """Closes the mapping, or leaves that to the collector while arrays over it are alive.

    Such arrays are alive while an error is on its way up, and a BufferError here would take that error's place.
    """
    with suppress(BufferError):
        mapped.close()
