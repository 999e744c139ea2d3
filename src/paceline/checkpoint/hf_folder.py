"""The tensors of a model in a Hugging Face folder: safetensors files, and possibly their index."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.hf_config import read_json
from paceline.checkpoint.tensors import HostTensor, QuantisedRows, TensorInfo, map_file, unmap
from paceline.errors import CheckpointError, quote

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_HEADER_LIMIT: Final = 100 * 2**20  # bytes; the format's own limit
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}

Scalar = TypeVar("Scalar", bound=np.generic)

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    """A tensor as a safetensors header has it; the offsets count from the end of the header."""

    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class _Stored(msgspec.Struct, frozen=True):
    info: TensorInfo
    shard: mmap.mmap
    offset: int


class SafetensorsTensors:
    """`Tensors` over the safetensors files of a folder.

    It parses the (simple) format itself, since the safetensors library offers numpy neither bfloat16 nor a view of the
    file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: list[mmap.mmap] = []
        self._entries: dict[str, _Stored] = {}
        try:
            for file in _shard_files(folder):
                self._add_shard(file)
            self._check_index()
        except CheckpointError:
            self.close()
            raise

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every shard."""
        return {name: stored.info for name, stored in self._entries.items()}

    def quantised(self, name: str) -> QuantisedRows | None:
        """None: nothing is."""
        return None

    def stored(self, name: str) -> memoryview:
        """The values' bytes."""
        entry = self._entries[name]
        return memoryview(entry.shard)[entry.offset : entry.offset + entry.info.nbytes]

    def read(self, name: str) -> HostTensor:
        """A view of the file."""
        entry = self._entries[name]
        shape, encoding = entry.info.shape, entry.info.encoding
        where = (entry.shard, math.prod(shape), entry.offset)
        match encoding:
            case "F32":
                return HostTensor(_view(np.float32, *where).reshape(shape))
            case "F16":
                return HostTensor(_view(np.float16, *where).reshape(shape))
            case "BF16":
                return HostTensor(_view(np.uint16, *where).reshape(shape), is_bfloat16=True)
        raise CheckpointError(
            f"{self._folder}: tensor {quote(name)} has the type {quote(encoding)}, "
            f"supported are {', '.join(_ITEM_BYTES)}"
        )

    def close(self) -> None:
        """Unmaps the files."""
        self._entries.clear()
        for shard in self._shards:
            unmap(shard)

    def _add_shard(self, file: Path) -> None:
        shard = map_file(file)
        self._shards.append(shard)
        header_bytes = int.from_bytes(shard[:8], "little")
        if len(shard) < 8 or header_bytes > min(_HEADER_LIMIT, len(shard) - 8):
            raise CheckpointError(
                f"{file}: its header claims {header_bytes} bytes of the file's {len(shard)}: "
                "it is cut short, damaged or no safetensors file"
            )
        try:
            header = msgspec.json.decode(shard[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: its header is damaged: {error}") from error
        for name, entry in entries.items():
            self._add_tensor(file, shard, 8 + header_bytes, name, entry)

    def _add_tensor(self, file: Path, shard: mmap.mmap, data_start: int, name: str, entry: _Entry) -> None:
        begin, end = entry.data_offsets
        item_bytes = _ITEM_BYTES.get(entry.dtype)
        if begin > end or (item_bytes is not None and end - begin != math.prod(entry.shape) * item_bytes):
            raise CheckpointError(
                f"{file}: tensor {quote(name)} of shape {tuple(entry.shape)} in {quote(entry.dtype)} "
                f"does not fit its {end - begin} bytes"
            )
        if data_start + end > len(shard):
            raise CheckpointError(
                f"{file}: tensor {quote(name)} ends at byte {data_start + end}, and the file has {len(shard)}: "
                "it is cut short or damaged"
            )
        if name in self._entries:
            raise CheckpointError(f"{file}: tensor {quote(name)} stands in two files of the folder")
        info = TensorInfo(name, tuple(entry.shape), entry.dtype, end - begin)
        self._entries[name] = _Stored(info, shard, data_start + begin)

    def _check_index(self) -> None:
        for name, file in _weight_map(self._folder).items():
            if name not in self._entries:
                raise CheckpointError(f"{self._folder / _INDEX}: tensor {quote(name)} is not in {quote(file)}")


def _view(dtype: type[Scalar], shard: mmap.mmap, count: int, offset: int) -> NDArray[Scalar]:
    return np.frombuffer(shard, dtype, count, offset)


def _shard_files(folder: Path) -> list[Path]:
    weight_map = _weight_map(folder)
    if weight_map:
        return [folder / file for file in sorted(set(weight_map.values()))]
    single = folder / _SINGLE
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file is there")
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds which tensor, by the index; empty where the folder has none."""
    index = folder / _INDEX
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {quote(file)} is not the name of a file in the folder")
    return weight_map
