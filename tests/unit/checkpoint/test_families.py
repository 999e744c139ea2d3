"""What each architecture's files say in their own ways becomes the same few fields."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.checkpoint import ModelConfig, Source, SourceKind, read_config
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import random_tensors, save_gguf, write_folder

TINY = SHAPES["tiny"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def from_folder(folder: Path, architecture: str, **changes: object) -> ModelConfig:
    write_folder(folder, changes={"architectures": [f"{architecture}ForCausalLM"], **changes})
    return read_config(Source(SourceKind.FOLDER, "it", folder))


def from_gguf(path: Path, architecture: str, **changes: object) -> ModelConfig:
    """A file's shape; tensors are Llama's, which the shape does not look at."""
    config = msgspec.structs.replace(TINY, architecture="llama")
    named = {f"{architecture}.{key}": value for key, value in changes.items()}
    tensors = {name: values for name, values in random_tensors(config).items() if name.startswith("model.embed")}
    shape = msgspec.structs.replace(config, architecture=architecture)
    save_gguf(path, tensors, config=shape, changes=named)
    return read_config(Source(SourceKind.GGUF, "it", path))


def test_mistral_has_a_window_unless_its_file_says_null(tmp_path: Path) -> None:
    assert from_folder(tmp_path, "Mistral").windows == (4096, 4096)
    assert from_folder(tmp_path, "Mistral", sliding_window=16).windows == (16, 16)
    assert from_folder(tmp_path, "Mistral", sliding_window=None).windows == ()


def test_a_qwen_has_a_window_only_where_it_says_that_it_is_used(tmp_path: Path) -> None:
    config = from_folder(tmp_path, "Qwen2", sliding_window=16, max_window_layers=1, use_sliding_window=False)
    assert (config.windows, config.qkv_bias, config.qk_norm) == ((), True, False)
    config = from_folder(tmp_path, "Qwen2", sliding_window=16, max_window_layers=1, use_sliding_window=True)
    assert config.windows == (None, 16)
    config = from_folder(tmp_path, "Qwen3", head_dim=None)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 128)


def test_gemma_3_is_read_in_its_older_spelling(tmp_path: Path) -> None:
    config = from_folder(
        tmp_path,
        "Gemma3",
        num_hidden_layers=4,
        sliding_window=32,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=64,
        tie_word_embeddings=None,
        hidden_activation="gelu_pytorch_tanh",
    )
    assert config.windows == (32, None, 32, None)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 5e3)
    assert config.rope_factors == (8.0,) * 8
    assert config.attention_scale == 0.125
    assert config.tied_embeddings


def test_llama_3s_scaling_keeps_short_waves_and_stretches_long_ones(tmp_path: Path) -> None:
    factors = from_folder(tmp_path, "Llama", rope_scaling=LLAMA3, rope_theta=10_000.0).rope_factors
    assert len(factors) == 8
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert list(factors) == sorted(factors)
    assert any(1.0 < factor < 8.0 for factor in factors)
    assert from_folder(tmp_path, "Llama", rope_parameters=LLAMA3 | {"rope_theta": 10_000.0}).rope_factors == factors


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("Llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 .* make no scaling"),
        ("Llama", {"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        ("Qwen3", {"attention_bias": True}, "attention_bias is True, which is not supported"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types is .* expected 2 of full_attention or"),
        ("Mistral", {"sliding_window": 0}, "an attention window is 0, expected more than 0"),
        ("Gemma3", {"hidden_act": None, "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("Gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu', which is not supported"),
        ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Llama", {"num_hidden_layers": 10**9}, "num_layers is 1000000000, expected at most"),
        ("Llama", {"head_dim": 10**9}, "head_dim is 1000000000, expected at most"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        from_folder(tmp_path, architecture, **changes)
    assert "config.json" in str(caught.value)


def test_a_model_with_images_is_refused_with_what_is_served(tmp_path: Path) -> None:
    write_folder(tmp_path, changes={"architectures": ["Gemma3ForConditionalGeneration"]})
    with pytest.raises(CheckpointError, match=r"Gemma3ForConditionalGeneration.*Qwen3ForCausalLM, Gemma3ForCausalLM"):
        read_config(Source(SourceKind.FOLDER, "it", tmp_path))


def test_what_llama_cpp_takes_for_granted_of_gemma_3_is_known(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"block_count": 12, "attention.sliding_window": 32, "rope.freq_base": 1e6}
    unsaid = {"attention.sliding_window_pattern": None, "rope.freq_base_swa": None, "attention.scale": None}
    config = from_gguf(tmp_path / "it.gguf", "gemma3", **sizes | unsaid)
    assert config.windows == ((32,) * 5 + (None,)) * 2
    assert (config.rope_theta, config.local_rope_theta, config.attention_scale) == (1e6, 10_000.0, None)
    scaled: dict[str, object] = {"block_count": 62, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = from_gguf(tmp_path / "it.gguf", "gemma3", **sizes | unsaid | scaled)
    assert config.rope_factors == (8.0,) * 8
    assert config.attention_scale == (64 / 4) ** -0.5


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, "supported are none, linear and the tensor rope_freqs.weight"),
        ("qwen3", {"expert_count": 4}, "mixtures of experts"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is not supported"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "expected 2 of true or false"),
        ("llama", {"block_count": 10**9}, "num_layers is 1000000000, expected at most"),
    ],
)
def test_what_a_gguf_file_asks_for_in_vain_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        from_gguf(tmp_path / "it.gguf", architecture, **changes)


def test_divisors_of_another_shape_are_refused(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TINY, rope_factors=(1.0,) * 7)
    save_gguf(tmp_path / "it.gguf", random_tensors(TINY), config=config)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has the shape \(7,\) .* expected \(8,\)"):
        read_config(Source(SourceKind.GGUF, "it", tmp_path / "it.gguf"))
