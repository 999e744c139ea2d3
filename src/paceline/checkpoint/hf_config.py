"""The shape of a model in a Hugging Face folder, out of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.model_config import ModelConfig, check_bounded, layer_windows
from paceline.checkpoint.rope import rope_factors
from paceline.errors import CheckpointError, quote

CONFIG: Final = "config.json"
ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
"""Hugging Face's names of the architectures that are served, and ours."""

_SILU: Final = ("silu", "swish")
_GELU: Final = ("gelu_pytorch_tanh",)
_REFUSED: Final[tuple[tuple[str, tuple[object, ...]], ...]] = (
    ("attention_bias", (None, False)),
    ("mlp_bias", (None, False)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (None, 1, 1.0)),
    ("final_logit_softcapping", (None,)),
    ("attn_logit_softcapping", (None,)),
    ("use_bidirectional_attention", (None, False)),
)
# What a file that does not say means, where Hugging Face's classes differ.
_HEAD_DIM: Final = {"qwen3": 128, "gemma3": 256}
_MISTRAL_WINDOW: Final = 4_096
_GEMMA_WINDOW: Final = 4_096
_GEMMA_PATTERN: Final = 6
_GEMMA_THETA: Final = 1_000_000.0
_GEMMA_LOCAL_THETA: Final = 10_000.0


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
    architecture = _architecture(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if num_heads <= 0:
        raise CheckpointError(f"{config_file}: num_attention_heads is {num_heads}, expected more than 0")
    head_dim = fields.integer("head_dim", _HEAD_DIM.get(architecture, hidden_size // num_heads))
    num_layers = fields.integer("num_hidden_layers")
    check_bounded(fields.origin, num_layers=num_layers, head_dim=head_dim)
    is_gemma = architecture == "gemma3"
    theta, factors, local_theta = _gemma_rope(fields, head_dim) if is_gemma else (*_rope(fields, head_dim), None)
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_tokens=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        tied_embeddings=fields.flag("tie_word_embeddings", is_gemma),
        eos_token_ids=_eos_token_ids(fields, config_file.parent),
        bos_token_id=fields.optional_integer("bos_token_id"),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        attention_scale=_gemma_scale(fields) if is_gemma else None,
        windows=_windows(fields, architecture),
        rope_factors=factors,
        local_rope_theta=local_theta,
    ).checked(str(config_file))


def _architecture(fields: Fields) -> str:
    """Our name of it, or `CheckpointError` for one, or a variant of one, that would be computed wrongly."""
    architectures = fields.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    known = [ours for theirs, ours in ARCHITECTURES.items() if theirs in listed]
    if not known:
        raise CheckpointError(
            f"{fields.origin}: architectures is {quote(architectures)}, supported are {', '.join(ARCHITECTURES)}"
        )
    key, accepted = ("hidden_activation", _GELU) if known[0] == "gemma3" else ("hidden_act", _SILU)
    for refused, values in (*_REFUSED, (key, (None, *accepted))):
        if fields.get(refused) not in values:
            raise CheckpointError(f"{fields.origin}: {refused} is {quote(fields.get(refused))}, which is not supported")
    return known[0]


def _windows(fields: Fields, architecture: str) -> tuple[int | None, ...]:
    """Each layer's attention window. Newer files say of what type each layer is, older ones have a rule."""
    layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    limited = [False] * layers
    match architecture:
        case "mistral":
            window = window if fields.has("sliding_window") else _MISTRAL_WINDOW
            limited = [True] * layers
        case "qwen2" | "qwen3" if fields.flag("use_sliding_window", False):
            limited = [layer >= fields.integer("max_window_layers", layers) for layer in range(layers)]
        case "gemma3":
            window = window if fields.has("sliding_window") else _GEMMA_WINDOW
            every = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", _GEMMA_PATTERN))
            limited = [every < 1 or (layer + 1) % every != 0 for layer in range(layers)]
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise fields.wrong("layer_types", f"{layers} of full_attention or sliding_attention")
        limited = [kind == "sliding_attention" for kind in kinds]
    return layer_windows(window, limited)


def _rope(fields: Fields, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """Base and divisors. Newer files say rope_parameters, older ones rope_scaling, with the base beside it."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.origin)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    return theta, rope_factors(rope, head_dim=head_dim, theta=theta)


def _gemma_rope(fields: Fields, head_dim: int) -> tuple[float, tuple[float, ...], float]:
    """Base and divisors of the layers without a window, and the base of those with one."""
    none = Fields({}, fields.origin)
    parameters = fields.section("rope_parameters") or none
    whole = parameters.section("full_attention") or fields.section("rope_scaling") or none
    local = parameters.section("sliding_attention") or none
    theta = whole.number("rope_theta", fields.number("rope_theta", _GEMMA_THETA))
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", _GEMMA_LOCAL_THETA))
    if rope_factors(local, head_dim=head_dim, theta=local_theta):
        raise CheckpointError(f"{local.origin}: scaled rotary embeddings of layers with a window are not supported")
    return theta, rope_factors(whole, head_dim=head_dim, theta=theta), local_theta


def _gemma_scale(fields: Fields) -> float:
    scalar = fields.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise CheckpointError(f"{fields.origin}: query_pre_attn_scalar is {scalar}, expected more than 0")
    return float(scalar**-0.5)


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
