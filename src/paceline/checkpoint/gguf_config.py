"""The shape of a model in a GGUF file, out of its metadata."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.gguf_header import GgufHeader
from paceline.checkpoint.model_config import ModelConfig, check_bounded, layer_windows
from paceline.checkpoint.rope import linear_factors
from paceline.checkpoint.tensors import map_file
from paceline.errors import CheckpointError, quote

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "gemma3")
"""llama.cpp's names of the architectures that are served; to it Mistral is a Llama."""
CONTROL_TOKEN: Final = 3
"""The number in `tokenizer.ggml.token_type` of a token that is never text."""
ROPE_FREQS: Final = "rope_freqs.weight"
"""The tensor that holds what each rotary frequency is divided by: how llama.cpp stores Llama 3's scaling."""

_ENDS_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
_FLOAT32: Final = 0  # a tensor's type number
# What llama.cpp takes for granted of Gemma 3: a global layer after five local ones, whose base is this.
_GEMMA_PATTERN: Final = 6
_GEMMA_LOCAL_THETA: Final = 10_000.0
_GEMMA_27B_LAYERS: Final = 62


def model_config(header: GgufHeader, name: str) -> ModelConfig:
    """The model's shape, or `CheckpointError` for an architecture or a variant that is not served."""
    fields = Fields(header.metadata, str(header.path))
    family = fields.text("general.architecture")
    if family not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture is {quote(family)}, supported are {', '.join(ARCHITECTURES)}"
        )
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path}: the tensor {_EMBEDDING} is missing or not a matrix")
    hidden_size = fields.integer(f"{family}.embedding_length")
    num_heads = fields.integer(f"{family}.attention.head_count")
    if num_heads <= 0:
        raise CheckpointError(f"{header.path}: {family}.attention.head_count is {num_heads}, expected more than 0")
    head_dim = fields.integer(f"{family}.attention.key_length", hidden_size // num_heads)
    num_layers = fields.integer(f"{family}.block_count")
    check_bounded(fields.origin, num_layers=num_layers, head_dim=head_dim)
    _refuse_variants(fields, family, head_dim)
    is_gemma = family == "gemma3"
    return ModelConfig(
        architecture=family,
        name=name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{family}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{family}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_tokens=fields.integer(f"{family}.context_length"),
        norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{family}.rope.freq_base", 10_000.0),
        tied_embeddings=_OUTPUT not in header.tensors,
        eos_token_ids=_eos_token_ids(fields),
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        attention_scale=_attention_scale(fields, family, num_layers),
        windows=_windows(fields, family, num_layers),
        rope_factors=_rope_factors(header, fields, family, head_dim),
        local_rope_theta=fields.number("gemma3.rope.freq_base_swa", _GEMMA_LOCAL_THETA) if is_gemma else None,
    ).checked(str(header.path))


def _refuse_variants(fields: Fields, family: str, head_dim: int) -> None:
    """Raises `CheckpointError` for what a name also covers and this version would compute wrongly."""
    experts = fields.integer(f"{family}.expert_count", 0)
    if experts:
        raise CheckpointError(
            f"{fields.origin}: {family}.expert_count is {experts}: mixtures of experts are not supported"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.number(f"{family}.{key}", 0.0):
            raise CheckpointError(f"{fields.origin}: {family}.{key} is not supported")
    rotated = fields.integer(f"{family}.rope.dimension_count", head_dim)
    value_dim = fields.integer(f"{family}.attention.value_length", head_dim)
    if rotated != head_dim or value_dim != head_dim:
        raise CheckpointError(
            f"{fields.origin}: heads of {head_dim} with {rotated} rotated dimensions and values of {value_dim} "
            "are not supported: all three must be equal"
        )


def _attention_scale(fields: Fields, family: str, num_layers: int) -> float | None:
    """What the metadata says, mostly nothing; the largest Gemma is known by its layers, as llama.cpp has it."""
    scale = fields.number(f"{family}.attention.scale", 0.0)
    if family == "gemma3" and num_layers == _GEMMA_27B_LAYERS and not scale:
        heads = fields.integer(f"{family}.attention.head_count")
        return float((fields.integer(f"{family}.embedding_length") / heads) ** -0.5)
    return scale or None


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_integer(f"{family}.attention.sliding_window") or None
    pattern = fields.get(f"{family}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(limited, bool) for limited in pattern):
            raise fields.wrong(f"{family}.attention.sliding_window_pattern", f"{num_layers} of true or false")
        return layer_windows(window, pattern)
    every = fields.integer(
        f"{family}.attention.sliding_window_pattern", _GEMMA_PATTERN if family == "gemma3" else num_layers + 1
    )
    return layer_windows(window, [every < 1 or (layer + 1) % every != 0 for layer in range(num_layers)])


def _rope_factors(header: GgufHeader, fields: Fields, family: str, head_dim: int) -> tuple[float, ...]:
    """The divisors of the rotary frequencies: one number for all in the metadata, or a tensor of them."""
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"{header.path}: {family}.rope.scaling.type is {quote(kind)}, "
            f"supported are none, linear and the tensor {ROPE_FREQS}"
        )
    stored = header.tensors.get(ROPE_FREQS)
    if stored is None:
        factor = fields.number(f"{family}.rope.scaling.factor", 1.0) if kind == "linear" else 1.0
        return linear_factors(factor, head_dim=head_dim)
    if kind == "linear" or stored.type_number != _FLOAT32 or stored.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{header.path}: the tensor {ROPE_FREQS} has the shape {stored.shape} and the type {stored.type_number} "
            f"beside {kind} scaling, expected ({head_dim // 2},), {_FLOAT32} and none"
        )
    if stored.offset + 4 * stored.shape[0] > header.file_bytes:
        raise CheckpointError(f"{header.path}: it ends inside {ROPE_FREQS}: the file is cut short or damaged")
    with map_file(header.path) as mapped:
        return tuple(np.frombuffer(mapped[stored.offset : stored.offset + 4 * stored.shape[0]], "<f4").tolist())


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """The ids that end a turn: what the metadata names, and the usual ones where they are control tokens."""
    ids = [
        token_id
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        if (token_id := fields.optional_integer(f"tokenizer.ggml.{key}")) is not None
    ]
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        for text in _ENDS_OF_TURN:
            token_id = tokens.index(text) if text in tokens else len(kinds)
            if token_id < len(kinds) and kinds[token_id] == CONTROL_TOKEN:
                ids.append(token_id)
    return tuple(sorted(set(ids)))
