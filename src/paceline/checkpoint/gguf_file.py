"""A model in one GGUF file: its `ModelConfig`, and its tensors dequantised by the `gguf` library."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.gguf_header import GgufHeader, GgufTensor
from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.tensors import HostTensor, TensorInfo, map_file, unmap
from paceline.errors import CheckpointError, quote

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

ARCHITECTURES: Final = ("llama",)
CONTROL_TOKEN: Final = 3
"""The number in `tokenizer.ggml.token_type` of a token that is never text."""

_END_OF_TURN: Final = "<|im_end|>"
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
_WHOLE_MODEL: Final = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _OUTPUT: "lm_head.weight",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_config(header: GgufHeader, name: str) -> ModelConfig:
    """The model's shape, or `CheckpointError` for an architecture or a variant that is not served."""
    fields = Fields(header.metadata, str(header.path))
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture is {quote(architecture)}, supported are {', '.join(ARCHITECTURES)}"
        )
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path}: the tensor {_EMBEDDING} is missing or not a matrix")
    hidden_size = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    if num_heads <= 0:
        raise CheckpointError(f"{header.path}: llama.attention.head_count is {num_heads}, expected more than 0")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // num_heads)
    _refuse_variants(header, fields, head_dim)
    return ModelConfig(
        architecture="llama",
        name=name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("llama.feed_forward_length"),
        num_layers=fields.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_tokens=fields.integer("llama.context_length"),
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("llama.rope.freq_base", 10_000.0),
        tied_embeddings=_OUTPUT not in header.tensors,
        eos_token_ids=_eos_token_ids(fields),
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
    ).checked(str(header.path))


def _refuse_variants(header: GgufHeader, fields: Fields, head_dim: int) -> None:
    """Raises `CheckpointError` for what the name `llama` also covers and this version would compute wrongly."""
    experts = fields.integer("llama.expert_count", 0)
    if experts:
        raise CheckpointError(f"{header.path}: llama.expert_count is {experts}: mixtures of experts are not supported")
    scaling = fields.text("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        found = f"llama.rope.scaling.type {scaling!r}" if scaling != "none" else "the tensor rope_freqs.weight"
        raise CheckpointError(f"{header.path}: scaled rotary embeddings are not supported, found {found}")
    rotated = fields.integer("llama.rope.dimension_count", head_dim)
    value_dim = fields.integer("llama.attention.value_length", head_dim)
    if rotated != head_dim or value_dim != head_dim:
        raise CheckpointError(
            f"{header.path}: heads of {head_dim} with {rotated} rotated dimensions and values of {value_dim} "
            "are not supported: all three must be equal"
        )


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """The ids that end a turn: what the metadata names, and `<|im_end|>` where it is a control token."""
    ids = [
        token_id
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        if (token_id := fields.optional_integer(f"tokenizer.ggml.{key}")) is not None
    ]
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and _END_OF_TURN in tokens:
        token_id = tokens.index(_END_OF_TURN)
        if token_id < len(kinds) and kinds[token_id] == CONTROL_TOKEN:
            ids.append(token_id)
    return tuple(sorted(set(ids)))


class GgufTensors:
    """`Tensors` over one GGUF file. llama.cpp's order of the query and key rows is undone."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        # Imported late: the router reads headers only, and its start should not pay for the library.
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._path = header.path
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._entries: dict[str, tuple[TensorInfo, GgufTensor, GGMLQuantizationType]] = {}
        for tensor in header.tensors.values():
            try:
                kind = GGMLQuantizationType(tensor.type_number)
            except ValueError as error:
                raise self._broken(tensor.name, f"has the unknown type {tensor.type_number}") from error
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if tensor.shape[-1] % block:
                raise self._broken(tensor.name, f"{kind.name} has rows of {tensor.shape[-1]}, no multiple of {block}")
            nbytes = math.prod(tensor.shape) // block * block_bytes
            if tensor.offset + nbytes > header.file_bytes:
                needed = tensor.offset + nbytes
                raise self._broken(
                    tensor.name,
                    f"ends at byte {needed}, and the file has {header.file_bytes}: it is cut short or damaged",
                )
            info = TensorInfo(_hugging_face_name(tensor.name), tensor.shape, kind.name, nbytes)
            self._entries[info.name] = info, tensor, kind
        self._mapped = map_file(header.path)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its Hugging Face name."""
        return {name: info for name, (info, _, _) in self._entries.items()}

    def stored(self, name: str) -> memoryview:
        """The quantised bytes."""
        info, tensor, _ = self._entries[name]
        return memoryview(self._mapped)[tensor.offset : tensor.offset + info.nbytes]

    def read(self, name: str) -> HostTensor:
        """The values as float32."""
        from gguf.quants import dequantize

        info, tensor, kind = self._entries[name]
        rows = math.prod(info.shape[:-1])
        raw: NDArray[np.uint8] = np.frombuffer(self._mapped, np.uint8, info.nbytes, tensor.offset).reshape(rows, -1)
        num_heads = self._heads.get(name.split(".")[-2])
        if num_heads is not None:
            raw = self._unpermuted(tensor, raw, num_heads)
        try:
            values: NDArray[np.float32] = dequantize(raw, kind)
        except NotImplementedError as error:
            raise self._broken(tensor.name, f"has the type {kind.name}, which cannot be dequantised") from error
        return HostTensor(values.reshape(info.shape))

    def close(self) -> None:
        """Unmaps the file."""
        unmap(self._mapped)

    def _unpermuted(self, tensor: GgufTensor, raw: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
        """Rows in Hugging Face's order, which rotates halves of a head where llama.cpp rotates neighbouring pairs.

        Each row is quantised by itself, so that the small quantised rows can move in place of the large float ones.
        """
        if len(raw) % (2 * num_heads):
            raise self._broken(tensor.name, f"has {len(raw)} rows, no multiple of 2 x {num_heads} heads")
        half = len(raw) // num_heads // 2
        return raw.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(len(raw), -1)

    def _broken(self, tensor_name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {quote(tensor_name)} {message}")


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that Llama does not have keeps its own, for the loader to refuse."""
    if match := _LAYER.fullmatch(name):
        layer, part = match.groups()
        if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
    return _WHOLE_MODEL.get(name, name)
