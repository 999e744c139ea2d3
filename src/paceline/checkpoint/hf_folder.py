"""A model in a Hugging Face folder: config.json, safetensors files, and possibly their index."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.tensors import HostTensor, TensorInfo, map_file, unmap
from paceline.errors import CheckpointError, quote

ARCHITECTURES: Final = ("LlamaForCausalLM",)
CONFIG: Final = "config.json"

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_HEADER_LIMIT: Final = 100 * 2**20  # bytes; the format's own limit
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}

Scalar = TypeVar("Scalar", bound=np.generic)

_Size = Annotated[int, msgspec.Meta(ge=0)]


def read_json(path: Path) -> dict[str, object]:
    """A JSON file that holds an object, or `CheckpointError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: this is not a JSON object: {error}") from error


def model_config(config_file: Path, name: str) -> ModelConfig:
    """The model's shape out of config.json, or `CheckpointError` for what is not served."""
    fields = Fields(read_json(config_file), str(config_file))
    _refuse_variants(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if num_heads <= 0:
        raise CheckpointError(f"{config_file}: num_attention_heads is {num_heads}, expected more than 0")
    rope = _rope(fields)
    return ModelConfig(
        architecture="llama",
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        context_tokens=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10_000.0)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(fields, config_file.parent),
        bos_token_id=fields.optional_integer("bos_token_id"),
    ).checked(str(config_file))


def _refuse_variants(fields: Fields) -> None:
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        raise CheckpointError(
            f"{fields.origin}: architectures is {quote(architectures)}, supported are {', '.join(ARCHITECTURES)}"
        )
    for key, accepted in (
        ("attention_bias", (None, False)),
        ("mlp_bias", (None, False)),
        ("hidden_act", (None, "silu", "swish")),
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (None, 1, 1.0)),
    ):
        if fields.get(key) not in accepted:
            raise CheckpointError(f"{fields.origin}: {key} is {quote(fields.get(key))}, which is not supported")


def _rope(fields: Fields) -> Fields:
    """The rotary parameters, refused where they scale. Newer files say rope_parameters, older ones rope_scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.wrong(key, "an object")
        rope = Fields(value, f"{fields.origin}: {key}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise CheckpointError(
                f"{fields.origin}: {key} has the type {quote(kind)}, and scaled rotary embeddings are not supported"
            )
        return rope
    return Fields({}, fields.origin)


def _eos_token_ids(fields: Fields, folder: Path) -> tuple[int, ...]:
    """The ids that end a turn, by config.json and, as far as they are there, its neighbours.

    Chat models tuned from a base model often name the end of a turn in their tokenizer's settings alone.
    """
    ids = set(fields.token_ids("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids |= set(Fields(read_json(generation), str(generation)).token_ids("eos_token_id"))
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        ids |= _named_eos(read_json(settings))
    return tuple(sorted(ids))


def _named_eos(settings: Mapping[str, object]) -> set[int]:
    """The id of `eos_token`, where the settings list it with their added tokens."""
    eos, added = settings.get("eos_token"), settings.get("added_tokens_decoder")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None or not isinstance(added, dict):
        return set()
    return {
        int(token_id)
        for token_id, token in added.items()
        if isinstance(token, dict) and token.get("content") == text and token_id.isdecimal()
    }


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
