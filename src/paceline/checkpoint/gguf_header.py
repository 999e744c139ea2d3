"""The head of a GGUF file: its metadata and the table of its tensors.

The `gguf` library's own reader takes seconds over a vocabulary of 49,000 tokens, and fails on a damaged file with
whatever numpy raises; this one takes a fraction of a second, and bounds every length by the bytes that are there.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from paceline.checkpoint.tensors import map_file
from paceline.errors import CheckpointError, quote

MAGIC: Final = b"GGUF"

_VERSIONS: Final = (2, 3)
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
# The file format's numbers for the scalar types.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS: Final = 4
_MIN_PAIR_BYTES: Final = 8 + 4 + 1  # key length, type, the smallest value
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8  # name length, dimensions, type, offset


class GgufTensor(msgspec.Struct, frozen=True):
    """A row of the tensor table. `shape` is row-major; `offset` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class GgufHeader(msgspec.Struct, frozen=True):
    """What stands before the tensor data; `tensors` is keyed by llama.cpp's names."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]
    file_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Parses the head of the file, or raises `CheckpointError` naming the file and what is wrong."""
    with map_file(path) as mapped:
        return _Cursor(path, mapped).header()


class _Cursor:
    """A position in the mapped file; each read checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(len(MAGIC), "the magic") != MAGIC:
            raise self._broken(f"it starts with {quote(self._data[:4])}, expected {MAGIC!r}: this is no GGUF file")
        version = self._u32("the version")
        if version not in _VERSIONS:
            raise self._broken(f"GGUF version {version} (little-endian) is not supported, only {_VERSIONS}")
        num_tensors = self._count("the number of tensors", _MIN_TENSOR_BYTES)
        num_pairs = self._count("the number of metadata pairs", _MIN_PAIR_BYTES)
        metadata: dict[str, object] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._broken(f"the metadata key {quote(key)} stands twice")
            metadata[key] = self._value(key, self._u32(key))
        table = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(self._path, metadata, self._placed(table, metadata), self._end)

    def _placed(self, table: list[GgufTensor], metadata: dict[str, object]) -> dict[str, GgufTensor]:
        """The table with offsets from the start of the file."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._broken(f"general.alignment is {quote(alignment)}, expected a positive multiple of 8")
        data_start = -(-self._at // alignment) * alignment
        tensors = {tensor.name: msgspec.structs.replace(tensor, offset=data_start + tensor.offset) for tensor in table}
        if len(tensors) != len(table):
            raise self._broken("two tensors have the same name")
        return tensors

    def _tensor(self) -> GgufTensor:
        name = self._string("a tensor's name")
        num_dims = self._u32(name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {quote(name)} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        dims = tuple(self._u64(name) for _ in range(num_dims))
        type_number = self._u32(name)
        return GgufTensor(name, dims[::-1], type_number, self._u64(name))  # the file's order is innermost first

    def _value(self, key: str, kind: int) -> object:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        code = self._scalar_code(key, kind)
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(code), key))
        return value

    def _array(self, key: str) -> list[str] | list[int] | list[float] | list[bool]:
        kind = self._u32(key)
        if kind == _STRING:
            return self._strings(key, self._count(key, _U64.size))
        code = self._scalar_code(key, kind)
        count = self._count(key, struct.calcsize(code))
        values: list[int] = np.frombuffer(self._take(count * struct.calcsize(code), key), f"<{code}").tolist()
        return values

    def _strings(self, key: str, count: int) -> list[str]:
        # One loop with local names: a vocabulary and its merges are 100,000 strings and more.
        data, at, end, unpack = self._data, self._at, self._end, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                (size,) = unpack(data, at)
                at += 8
                if size > end - at:
                    raise self._ends_early(key)
                strings.append(data[at : at + size].decode())
                at += size
        except struct.error as error:
            raise self._ends_early(key) from error
        except UnicodeDecodeError as error:
            raise self._broken(f"a string of {quote(key)} is not UTF-8") from error
        self._at = at
        return strings

    def _scalar_code(self, key: str, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"{quote(key)} has the unknown value type {kind}")
        return code

    def _string(self, what: str) -> str:
        raw = self._take(self._u64(what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"{quote(what)} is not UTF-8") from error

    def _count(self, what: str, item_bytes: int) -> int:
        """A count of items that take at least `item_bytes` each, bounded by what is left of the file."""
        count = self._u64(what)
        if count > (self._end - self._at) // item_bytes:
            raise self._broken(f"{quote(what)} counts {count} items, more than the file's {self._end} bytes can hold")
        return count

    def _u32(self, what: str) -> int:
        (value,) = _U32.unpack(self._take(_U32.size, what))
        return int(value)

    def _u64(self, what: str) -> int:
        (value,) = _U64.unpack(self._take(_U64.size, what))
        return int(value)

    def _take(self, size: int, what: str) -> bytes:
        if size > self._end - self._at:
            raise self._ends_early(what)
        self._at += size
        return self._data[self._at - size : self._at]

    def _ends_early(self, what: str) -> CheckpointError:
        return self._broken(f"it ends at byte {self._end}, inside {quote(what)}: the file is cut short or damaged")

    def _broken(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")
