"""Tiny random models made by transformers, one shape after another for each architecture: the oracle of our own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging

from paceline.checkpoint import Source

CONTEXT_TOKENS: Final = 512
VOCAB_SIZE: Final = 331


@dataclass(frozen=True, slots=True)
class Shape:
    """What varies between the random models of an architecture. `window` is in tokens."""

    kv_heads: int
    group: int  # heads for each KV head
    head_dim: int
    layers: int
    window: int
    tied: bool = False


SHAPES: Final = (
    Shape(kv_heads=1, group=1, head_dim=16, layers=2, window=16),
    Shape(kv_heads=2, group=2, head_dim=32, layers=3, window=33, tied=True),
    Shape(kv_heads=1, group=4, head_dim=64, layers=2, window=5),
    Shape(kv_heads=2, group=3, head_dim=20, layers=7, window=8),
    Shape(kv_heads=3, group=8, head_dim=16, layers=2, window=100, tied=True),
)


def _common(shape: Shape, hidden_size: int = 48) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.kv_heads * shape.group,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        # Products of the order of 1: where they grow with the size, float32 itself is off by 1e-4 against float64.
        "initializer_range": hidden_size**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _llama(shape: Shape) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_common(shape)))


def _llama3(shape: Shape) -> Any:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0 * shape.kv_heads,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**_common(shape) | {"rope_parameters": scaling}))


def _mistral(shape: Shape) -> Any:
    return MistralForCausalLM(MistralConfig(**_common(shape), sliding_window=shape.window))


def _qwen2(shape: Shape) -> Any:
    # Its heads always make up the hidden size; some of its layers may have a window.
    settings = _common(shape, shape.kv_heads * shape.group * shape.head_dim)
    del settings["head_dim"]
    return Qwen2ForCausalLM(
        Qwen2Config(**settings, use_sliding_window=shape.tied, sliding_window=shape.window, max_window_layers=1)
    )


def _qwen3(shape: Shape) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**_common(shape)))


def _gemma3(shape: Shape) -> Any:
    every = 2 if shape.layers < 6 else 6
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(shape.layers)]
    settings = _common(shape) | {"tie_word_embeddings": True, "layer_types": kinds}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**settings, sliding_window=shape.window, query_pre_attn_scalar=3 * shape.head_dim)
    )


ARCHITECTURES: Final[dict[str, Callable[[Shape], Any]]] = {
    "llama": _llama,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}
"""What makes a model of each architecture, untrained and in float32; `llama3` is Llama with scaled positions."""


def make(architecture: str, shape: Shape, *, seed: int = 0) -> Any:
    """A model in evaluation mode. What a fresh one has at 0 or 1 is random too, so that leaving it out shows."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture](shape).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                low = -0.5 if architecture == "gemma3" else 0.5  # Gemma adds 1
                parameter.uniform_(low, low + 1.0)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model


def save(model: Any, folder: Path, *, shards: bool = False) -> None:
    """Writes the folder that Hugging Face would, without a tokenizer; with `shards`, its weights in several files."""
    quieten: Any = logging.disable_progress_bar
    quieten()
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")


def read_gguf(source: Source) -> Any:
    """transformers' own reading of a GGUF file, dequantised to float32."""
    assert source.path is not None
    reader: Any = gguf_reader.load_gguf_checkpoint
    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32).eval()
    with redirect_stderr(StringIO()):  # a bar that no setting turns off
        tensors = reader(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight"}, left
    assert not left.unexpected_keys, left
    model.tie_weights()
    return model
