"""Each architecture against transformers: tiny random checkpoints, read from the files that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Source, SourceKind, read_config
from paceline.engine.batch import build_batch
from paceline.engine.block_pool import BlockPool
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.runner import Runner
from paceline.engine.weights import load
from paceline.testing.random_models import ARCHITECTURES, SHAPES, VOCAB_SIZE, Shape, make, save
from paceline.types import RequestId, SamplingParams, blocks_for

LENGTHS = (1, 15, 16, 17, 40, 130)
NUM_BLOCKS = 40


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def last_logits(runner: Runner, chunk: int) -> list[torch.Tensor]:
    """Each prompt's, all advancing by `chunk` tokens a step."""
    pool = BlockPool(NUM_BLOCKS)
    requests = [
        EngineRequest(RequestId(str(index)), tokens, len(tokens), SamplingParams(), pool.lease(blocks_for(len(tokens))))
        for index, tokens in enumerate(prompts())
    ]
    config = runner.model.config
    windows = {config.window_of(layer) for layer in range(config.num_layers)}
    found: dict[RequestId, torch.Tensor] = {}
    while len(found) < len(requests):
        batch = [
            Chunk(each, each.computed, min(chunk, each.remaining)) for each in requests if each.request_id not in found
        ]
        logits = runner.model.forward(build_batch(batch, runner.pool, windows), runner.pool, lambda: None)
        found.update(zip([part.request.request_id for part in batch if part.samples], logits, strict=True))
        for part in batch:
            part.request.computed = part.end
    return [found[each.request_id] for each in requests]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Runner:
    source = Source(SourceKind.FOLDER, folder.name, folder)
    config = read_config(source)
    return Runner(config, load(source, config, dtype=dtype, device="cpu"), num_blocks=NUM_BLOCKS)


def assert_equal_to(model: Any, runner: Runner, chunk: int) -> None:
    for found, tokens in zip(last_logits(runner, chunk), prompts(), strict=True):
        expected = model(torch.tensor([tokens])).logits[0, -1]
        assert expected.std() > 0.1  # logits that hardly differ would compare equal by accident
        torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_log_probabilities_equal_transformers(tmp_path: Path, architecture: str, shape: Shape) -> None:
    model = make(architecture, shape)
    save(model, tmp_path)
    runner = loaded(tmp_path)
    for chunk in (1, 7, 512):
        assert_equal_to(model, runner, chunk)
