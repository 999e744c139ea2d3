"""In batch-invariant mode, in bfloat16, a request gets the same tokens alone, among 64, in chunks, and preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from paceline import kernels
from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.engine import Engine
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.weights import Weights, load
from paceline.types import RequestId, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = msgspec.structs.replace(SHAPES["smollm2-135m"], context_tokens=2048)
DRAW = random.Random(5)
PROMPTS = [DRAW.choices(range(SHAPE.vocab_size), k=DRAW.randint(1, 400)) for _ in range(64)]


@pytest.fixture(scope="module")
def weights() -> Iterator[Weights]:
    kernels.set_batch_invariant(True)
    source = resolve("dummy:smollm2-135m", cache_dir=Path("unused"))
    yield load(source, SHAPE, dtype=torch.bfloat16, device="cuda:0", seed=1)
    kernels.set_batch_invariant(False)


def tokens(weights: Weights, prompts: list[list[int]], *, blocks: int = 4096, budget: int = 512) -> list[list[int]]:
    """What each prompt gets, all of them asked at once."""
    runner = GraphRunner(SHAPE, weights, num_blocks=blocks, token_budget=budget, max_requests=64)
    runner.capture()
    engine = Engine(SHAPE, weights, num_blocks=blocks, token_budget=budget, max_requests=64, runner=runner)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    waiting = [(RequestId(name), prompt) for name, prompt in zip(found, prompts, strict=True)]
    while waiting or engine.has_work:
        while waiting:
            name, prompt = waiting[0]
            lease = engine.try_reserve(len(prompt) + 39, upfront_tokens=len(prompt))
            if lease is None:
                break
            engine.add(name, prompt, sampling, lease=lease, root=None)
            waiting.pop(0)
        for done in engine.step().progress:
            found[done.request_id] += done.token_ids
    return list(found.values())


def test_tokens_are_the_same_alone_and_among_64(weights: Weights) -> None:
    together = tokens(weights, PROMPTS)
    for index in (0, 17, 63):
        assert tokens(weights, [PROMPTS[index]]) == [together[index]]


def test_tokens_are_the_same_in_small_chunks_and_after_preemption(weights: Weights) -> None:
    together = tokens(weights, PROMPTS)
    assert tokens(weights, PROMPTS, blocks=256, budget=96) == together
