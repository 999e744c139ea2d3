"""Small checkpoints in real file formats, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.checkpoint import ModelConfig
from paceline.checkpoint.dummy import SHAPES

CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
"""llama.cpp's name of each architecture."""

_GGUF_NAMES: Final = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES: Final = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_tensors(config: ModelConfig = SHAPES["tiny"], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the model by its Hugging Face name, float32, small and random."""
    random = np.random.default_rng(seed)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    in_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in in_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return {name: random.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()}


def small_vocabulary(control: Sequence[str] = CONTROL) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a byte-level BPE: the control tokens first, then every byte, then three merges."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    return [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)], merges


def sentencepiece_metadata(*, add_space_prefix: bool = False) -> dict[str, object]:
    """`changes` for `write_gguf` that make its tokenizer a SentencePiece BPE as Gemma's: id 2 begins a prompt, 5 ends
    a turn; bytes, letters, a few words, and two tokens that are found before anything is merged.
    """
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    found_first = ["\n\n", "  "]
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁t", "th", "in", "he", "▁the", "▁th", "the", "ing", "user", "▁a", "er", "us", "es", "▁▁"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzé,.\n"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*control, *found_first, *raw_bytes, *words, *letters],
        "tokenizer.ggml.scores": [
            *[-1000.0] * (len(control) + len(found_first)),
            *[0.0] * len(raw_bytes),
            *[-float(rank) for rank in range(len(words) + len(letters))],
        ],
        "tokenizer.ggml.token_type": [
            *[3] * len(control),
            *[4] * len(found_first),
            *[6] * len(raw_bytes),
            *[1] * (len(words) + len(letters)),
        ],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def write_gguf(
    path: Path, *, config: ModelConfig = SHAPES["tiny"], seed: int = 0, changes: dict[str, object] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Writes a GGUF file in float32 and returns its tensors in Hugging Face's names and layout.

    `changes` replaces metadata: a string, a bool, an int, a float or a list by key, None to leave the key out.
    """
    tensors = random_tensors(config, seed)
    save_gguf(path, tensors, config=config, changes=changes)
    return tensors


def save_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    config: ModelConfig,
    changes: dict[str, object] | None = None,
    encoding: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Writes these tensors, which have Hugging Face's names and layout, as llama.cpp's converter does.

    Matrices are quantised to `encoding`, one that the library can; `changes` as for `write_gguf`.
    """
    family = FAMILIES[config.architecture]
    writer = gguf.GGUFWriter(path, family, use_temp_file=False)
    for key, value in (_gguf_metadata(config, family) | (changes or {})).items():
        _add_pair(writer, key, value)
    if config.rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_factors, np.float32))
    for name, values in tensors.items():
        stored = values
        if family == "llama":
            stored = _permuted(name, values, config)
        elif family == "gemma3" and name.endswith("norm.weight"):
            stored = values + np.float32(1.0)
        kind = encoding if stored.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name, family), gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(
    folder: Path,
    *,
    config: ModelConfig = SHAPES["tiny"],
    changes: dict[str, object] | None = None,
    control: Sequence[str] = CONTROL,
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """Writes config.json and a small tokenizer.json, without weights; `changes` replaces settings of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(settings | (changes or {})))
    tokens, merges = small_vocabulary(control)
    backend = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": chat_template})
    )


def _gguf_metadata(config: ModelConfig, family: str) -> dict[str, object]:
    tokens, merges = small_vocabulary()
    sizes = {
        "block_count": config.num_layers,
        "context_length": config.context_tokens,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.scale": config.attention_scale,
        "attention.sliding_window": next((window for window in config.windows if window), None),
        "attention.sliding_window_pattern": [window is not None for window in config.windows] or None,
        "rope.freq_base": config.rope_theta,
        "rope.freq_base_swa": config.local_rope_theta,
    }
    return {f"{family}.{key}": value for key, value in sizes.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_pair(writer: Any, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _gguf_name(name: str, family: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *part, kind = name.split(".")
        names = _GEMMA_NAMES if family == "gemma3" else _GGUF_NAMES
        return f"blk.{layer}.{names['.'.join(part)]}.{kind}"
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    return whole.get(name, "output.weight")


def _permuted(name: str, values: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Query and key rows in llama.cpp's order: the pair (i, i + head_dim / 2) of a head becomes neighbours."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
