"""Each architecture against transformers: tiny random checkpoints, read from the files that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Source, SourceKind, read_config
from paceline.checkpoint.kv_groups import KvGroups
from paceline.engine.runner import Runner
from paceline.engine.weights import load
from paceline.testing.checkpoints import save_gguf
from paceline.testing.chunked import answers, expected
from paceline.testing.random_models import ARCHITECTURES, SHAPES, VOCAB_SIZE, Shape, make, save

LENGTHS = (1, 15, 16, 17, 40, 130)
NEW_TOKENS = 4
NUM_BLOCKS = 40


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Runner:
    source = Source(SourceKind.FOLDER, folder.name, folder)
    config = read_config(source)
    return Runner(
        config, load(source, config, dtype=dtype, device="cpu"), num_blocks=NUM_BLOCKS * len(KvGroups.of(config))
    )


def assert_equal_to(model: Any, runner: Runner, chunk: int) -> None:
    found = answers(runner, prompts(), chunk=chunk, new_tokens=NEW_TOKENS)
    for answer, tokens in zip(found, prompts(), strict=True):
        logprobs = expected(model, tokens, answer.token_ids)
        assert logprobs.std() > 0.1  # such as hardly differ would compare equal by accident
        torch.testing.assert_close(torch.stack(answer.logprobs), logprobs, atol=1e-4, rtol=0)
        assert answer.token_ids == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_transformers(tmp_path: Path, architecture: str, shape: Shape) -> None:
    model = make(architecture, shape)
    save(model, tmp_path)
    runner = loaded(tmp_path)
    for chunk in (1, 7, 512):
        assert_equal_to(model, runner, chunk)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gguf_file_gives_the_same_as_the_folder_it_was_made_from(
    tmp_path: Path, architecture: str, shape: Shape
) -> None:
    model = make(architecture, shape)
    save(model, tmp_path / "folder")
    config = read_config(Source(SourceKind.FOLDER, "folder", tmp_path / "folder"))
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    if config.tied_embeddings:
        del tensors["lm_head.weight"]
    save_gguf(tmp_path / "model.gguf", tensors, config=config)
    source = Source(SourceKind.GGUF, "model", tmp_path / "model.gguf")
    read = read_config(source)
    assert read.windows == config.windows
    assert read.rope_factors == pytest.approx(config.rope_factors, rel=1e-6)
    num_blocks = NUM_BLOCKS * len(KvGroups.of(read))
    runner = Runner(read, load(source, read, dtype=torch.float32, device="cpu"), num_blocks=num_blocks)
    assert_equal_to(model, runner, 64)


def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    model = make("qwen2", SHAPES[1])
    save(model, tmp_path, shards=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal_to(model, loaded(tmp_path), 64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bfloat16_model_stays_close_to_its_float32_self(tmp_path: Path, architecture: str) -> None:
    save(make(architecture, SHAPES[0]), tmp_path)
    wide, narrow = (
        torch.stack([answer.logprobs[0].exp() for answer in answers(loaded(tmp_path, dtype), prompts(), chunk=64)])
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.nn.functional.cosine_similarity(wide, narrow).min() > 0.99


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_a_dummy_of_each_kind_has_random_weights_and_runs(tmp_path: Path, architecture: str) -> None:
    save(make(architecture, SHAPES[0]), tmp_path)
    source = Source(SourceKind.DUMMY, "dummy:it", tmp_path / "config.json")
    config = read_config(source)
    runner = Runner(
        config,
        load(source, config, dtype=torch.float32, device="cpu"),
        num_blocks=NUM_BLOCKS * len(KvGroups.of(config)),
    )
    assert all(0.1 < float(answer.logprobs[0].std()) < 10 for answer in answers(runner, prompts(), chunk=64))
