"""The tensors of a model in one GGUF file, dequantised by the `gguf` library."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.gguf_config import ROPE_FREQS
from paceline.checkpoint.gguf_header import GgufHeader, GgufTensor
from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.tensors import HostTensor, QuantisedRows, TensorInfo, map_file, unmap
from paceline.errors import CheckpointError, quote

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_WHOLE_MODEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA_LAYER: Final = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CHUNK_VALUES: Final = 2**22  # dequantised at once: what the library needs for it stays small and in the cache


class GgufTensors:
    """`Tensors` over one GGUF file.

    What llama.cpp changes is undone: the order of a Llama's query and key rows, and the 1 it adds to Gemma's norms.
    """

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        # Imported late: the router reads headers only, and its start should not pay for the library.
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._path = header.path
        is_llama = config.architecture == "llama"
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if is_llama else {}
        self._is_gemma = config.architecture == "gemma3"
        self._entries: dict[str, tuple[TensorInfo, GgufTensor, GGMLQuantizationType]] = {}
        for tensor in header.tensors.values():
            if tensor.name == ROPE_FREQS:  # a part of the shape
                continue
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
            info = TensorInfo(self._hugging_face_name(tensor.name), tensor.shape, kind.name, nbytes)
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
        info, tensor, kind = self._entries[name]
        raw = self._rows(name)
        values = self._dequantized(tensor, raw, kind, len(raw))
        if self._is_gemma and name.endswith("norm.weight"):
            values -= 1.0
        return HostTensor(values.reshape(info.shape))

    def quantised(self, name: str) -> QuantisedRows | None:
        """The rows as they lie in the file, in Hugging Face's order."""
        info, _, _ = self._entries[name]
        return QuantisedRows(info.encoding, self._rows(name).copy()) if len(info.shape) == 2 else None

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """[rows, bytes of a row], perhaps a view of the file."""
        info, tensor, _ = self._entries[name]
        rows = math.prod(info.shape[:-1])
        raw: NDArray[np.uint8] = np.frombuffer(self._mapped, np.uint8, info.nbytes, tensor.offset).reshape(rows, -1)
        num_heads = self._heads.get(name.split(".")[-2])
        return raw if num_heads is None else self._unpermuted(tensor, raw, num_heads)

    def _dequantized(
        self, tensor: GgufTensor, raw: NDArray[np.uint8], kind: GGMLQuantizationType, rows: int
    ) -> NDArray[np.float32]:
        """[rows, row length], a part of the rows at a time."""
        from gguf.quants import dequantize

        values: NDArray[np.float32] = np.empty((rows, tensor.shape[-1]), np.float32)
        step = max(1, _CHUNK_VALUES // max(1, tensor.shape[-1]))
        try:
            for first in range(0, rows, step):
                values[first : first + step] = dequantize(raw[first : first + step], kind)
        except NotImplementedError as error:
            raise self._broken(tensor.name, f"has the type {kind.name}, which cannot be dequantised") from error
        return values

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

    def _hugging_face_name(self, name: str) -> str:
        """Hugging Face's name of a tensor; one that the model does not have keeps its own, for the loader to refuse."""
        parts = _IN_GEMMA_LAYER if self._is_gemma else _IN_LAYER
        if match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            if part in parts:
                return f"model.layers.{layer}.{parts[part]}.{kind}"
        return _WHOLE_MODEL.get(name, name)
