from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint import Source, SourceKind, read_config
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.weights import Weights, load
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import random_tensors, write_folder, write_gguf

TINY = SHAPES["tiny"]
DUMMY = Source(SourceKind.DUMMY, "dummy:tiny", None)


def tensors_as_torch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values).to(dtype) for name, values in random_tensors().items()}


def folder_source(folder: Path, tensors: dict[str, torch.Tensor]) -> Source:
    write_folder(folder)
    save_file(tensors, folder / "model.safetensors")
    return Source(SourceKind.FOLDER, "tiny", folder)


def assert_holds(weights: Weights, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Compares exactly with `tensors`, keyed by Hugging Face's names."""

    def fused(layer: int, *parts: str) -> torch.Tensor:
        return torch.cat([tensors[f"model.layers.{layer}.{part}.weight"] for part in parts]).to(dtype)

    for index, layer in enumerate(weights.layers):
        expected = {
            "input_norm": fused(index, "input_layernorm"),
            "qkv": fused(index, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": fused(index, "self_attn.o_proj"),
            "mlp_norm": fused(index, "post_attention_layernorm"),
            "gate_up": fused(index, "mlp.gate_proj", "mlp.up_proj"),
            "down": fused(index, "mlp.down_proj"),
        }
        for name, values in expected.items():
            torch.testing.assert_close(getattr(layer, name), values, rtol=0, atol=0)
    torch.testing.assert_close(weights.embed, tensors["model.embed_tokens.weight"].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(weights.final_norm, tensors["model.norm.weight"].to(dtype), rtol=0, atol=0)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    torch.testing.assert_close(weights.lm_head, head.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_a_folders_tensors_are_fused_in_the_asked_dtype(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    tensors = tensors_as_torch(stored)
    source = folder_source(tmp_path, tensors)
    assert_holds(load(source, read_config(source), dtype=dtype, device="cpu"), tensors, dtype)


def test_a_gguf_file_gives_the_same_weights_as_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    source = Source(SourceKind.GGUF, "tiny", path)
    assert_holds(
        load(source, read_config(source), dtype=torch.float32, device="cpu"), tensors_as_torch(), torch.float32
    )


def test_tied_embeddings_are_one_tensor_even_where_the_head_is_stored_too(tmp_path: Path) -> None:
    source = folder_source(tmp_path, tensors_as_torch())
    write_folder(tmp_path, changes={"tie_word_embeddings": True})
    weights = load(source, read_config(source), dtype=torch.float32, device="cpu")
    assert weights.lm_head is weights.embed
    untied = load(DUMMY, TINY, dtype=torch.float32, device="cpu")
    assert untied.nbytes - weights.nbytes == weights.embed.nbytes


def test_a_step_reads_all_weights_but_an_embedding_that_is_not_the_head_too() -> None:
    untied = load(DUMMY, TINY, dtype=torch.float32, device="cpu")
    assert untied.step_nbytes == untied.nbytes - untied.embed.nbytes
    tied = load(DUMMY, msgspec.structs.replace(TINY, tied_embeddings=True), dtype=torch.float32, device="cpu")
    assert tied.step_nbytes == tied.nbytes == untied.step_nbytes


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    tensors = tensors_as_torch()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    source = folder_source(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of shape \(128, 64\) is missing"
    ):
        load(source, TINY, dtype=torch.float32, device="cpu")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = tensors_as_torch()
    tensors["model.norm.weight"] = torch.ones(63)
    source = folder_source(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \(63,\), expected \(64,\)"):
        load(source, TINY, dtype=torch.float32, device="cpu")


def test_a_tensor_without_a_place_is_refused_since_it_would_change_the_answers(tmp_path: Path) -> None:
    tensors = tensors_as_torch() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    source = folder_source(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"1 tensors have no place .* 'model\.layers\.0\.self_attn\.q_proj\.bias'"
    ):
        load(source, TINY, dtype=torch.float32, device="cpu")


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    tensors = tensors_as_torch() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    source = folder_source(tmp_path, tensors)
    assert_holds(load(source, TINY, dtype=torch.float32, device="cpu"), tensors, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_follow_their_seed_and_keep_activations_near_one(dtype: torch.dtype) -> None:
    first, again, other = (load(DUMMY, TINY, dtype=dtype, device="cpu", seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, other.layers[1].qkv)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)
    assert torch.equal(first.final_norm, torch.ones(TINY.hidden_size, dtype=dtype))
    hidden = torch.randn(1_000, TINY.hidden_size).to(dtype)
    assert 0.7 < float((hidden @ first.layers[0].gate_up.T).float().std()) < 1.4


def test_progress_counts_every_tensor_once(tmp_path: Path) -> None:
    tensors = tensors_as_torch()
    source = folder_source(tmp_path, tensors)
    calls: list[tuple[int, int]] = []
    load(source, TINY, dtype=torch.float32, device="cpu", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(index + 1, len(tensors)) for index in range(len(tensors))]


def test_a_config_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    source = folder_source(tmp_path, tensors_as_torch())
    wider = msgspec.structs.replace(TINY, intermediate_size=256)
    with pytest.raises(CheckpointError, match="expected \\(256, 64\\)"):
        load(source, wider, dtype=torch.float32, device="cpu")


@pytest.mark.model
def test_the_default_models_weights_equal_transformers_own_reading_of_the_file(default_model: Source) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    assert default_model.path is not None
    folder, file = str(default_model.path.parent), default_model.path.name
    config = AutoConfig.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = load_gguf_checkpoint(str(default_model.path), return_tensors=True, model_to_load=model)["tensors"]
    weights = load(default_model, read_config(default_model), dtype=torch.float32, device="cpu")
    assert_holds(weights, {name: torch.as_tensor(values) for name, values in expected.items()}, torch.float32)
