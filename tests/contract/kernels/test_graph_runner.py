"""The GPU's runner against the CPU's: one small upload, padded shapes, tokens that stay on the device."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from paceline import kernels
from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine import graph_runner
from paceline.engine.batch import Batch
from paceline.engine.beams import proposing
from paceline.engine.engine import Engine
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.runner import Runner
from paceline.engine.step_inputs import TABLE_ENTRIES
from paceline.engine.step_shape import StepShape
from paceline.engine.weights import Weights, load
from paceline.errors import EngineError, NumericalError
from paceline.services.decode.beams import LiveSearch
from paceline.types import RequestId, ReservationId, SamplingParams, TokenLogprob

TINY = msgspec.structs.replace(SHAPES["tiny"], context_tokens=256)
WINDOWED = msgspec.structs.replace(TINY, windows=(20, None))
BROAD = msgspec.structs.replace(SHAPES["smollm2-135m"], num_layers=2, context_tokens=256, vocab_size=TINY.vocab_size)
CONFIGS = {"full": TINY, "windowed": WINDOWED}
if torch.cuda.is_available():  # interpreted, it would take minutes
    CONFIGS["broad"] = BROAD  # whose products are cut into pieces
BLOCKS, BUDGET, REQUESTS = 12, 32, 6  # blocks of tokens


def answers(engine: Engine, seed: int, count: int) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]]]:
    """What a random workload gets, which the pool is too small for at once: tokens, and their log-probabilities."""
    draw = random.Random(seed)
    waiting = []
    for index in range(count):
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 8),
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**64),
            ignore_eos=True,
            logprobs=draw.choice([None, None, 0, 2]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.2]),
        )
        waiting.append((RequestId(str(index)), draw.choices(range(TINY.vocab_size), k=draw.randint(1, 40)), sampling))
    found: dict[str, list[int]] = {}
    scores: dict[str, list[TokenLogprob]] = {}
    while waiting or engine.has_work:
        while waiting:
            name, prompt, sampling = waiting[0]
            lease = engine.try_reserve(len(prompt) + sampling.max_tokens - 1, upfront_tokens=len(prompt), prompt=prompt)
            if lease is None:
                break
            engine.add(name, prompt, sampling, lease=lease)
            waiting.pop(0)
        for done in engine.step().progress:
            found.setdefault(done.request_id, []).extend(done.token_ids)
            scores.setdefault(done.request_id, []).extend(done.logprobs)
    assert engine.pool.free == engine.pool.total
    return found, scores


def made(config: ModelConfig, runner: Runner, weights: Weights) -> Engine:
    blocks = runner.pool.shape[0]
    return Engine(config, weights, num_blocks=blocks, token_budget=BUDGET, max_requests=REQUESTS, runner=runner)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", [1, 2] if torch.cuda.is_available() else [1])
def test_it_gives_the_same_tokens_as_a_runner_that_computes_at_once(
    seed: int, config: ModelConfig, triton_backend: None, device: torch.device
) -> None:
    weights = load(resolve("dummy:tiny", cache_dir=Path("unused")), config, dtype=torch.float32, device=device, seed=3)
    blocks = BLOCKS * len(KvGroups.of(config))
    plain = made(config, Runner(config, weights, num_blocks=blocks), weights)
    runner = GraphRunner(config, weights, num_blocks=blocks, token_budget=BUDGET, max_requests=REQUESTS)
    if device.type == "cuda":
        runner.capture()
    count = 60 if device.type == "cuda" else 4
    found, scores = answers(made(config, runner, weights), seed, count)
    expected, expected_scores = answers(plain, seed, count)
    assert found == expected
    assert scores.keys() == expected_scores.keys()
    for name, of_request in scores.items():
        for ours, theirs in zip(of_request, expected_scores[name], strict=True):
            assert ours.token_id == theirs.token_id
            assert abs(ours.logprob - theirs.logprob) < 1e-4
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]


def search(engine: Engine, company: int) -> list[list[int]]:
    """What a beam search finds, beside requests whose steps need nothing but tokens."""
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, beam_width=3)
    prompt = list(range(100, 120))
    lease = engine.try_reserve(25)
    assert lease is not None
    found = LiveSearch(engine, ReservationId("search"), sampling, ())
    engine.add(found.names[0], prompt, proposing(sampling, ()), lease=lease, proposes=True)
    for index in range(company):
        lease = engine.try_reserve(5 + index)
        assert lease is not None
        plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        engine.add(RequestId(str(index)), [7, 8, 9][: 1 + index], plain, lease=lease)
    while engine.has_work:
        for done in engine.step().progress:
            if "#" in done.request_id and done.token_ids:
                found.propose(done.request_id, done.logprobs)
    assert engine.pool.free == engine.pool.total
    return [[token.token_id for token in each.beam.tokens] for each in found.hypotheses]


# Interpreted, each takes seconds; the model with windows has a group without one as well.
@pytest.mark.parametrize("name", ["full", "windowed"] if torch.cuda.is_available() else ["windowed"])
def test_a_beam_search_finds_the_same(name: str, triton_backend: None, device: torch.device) -> None:
    config = CONFIGS[name]
    weights = load(resolve("dummy:tiny", cache_dir=Path("unused")), config, dtype=torch.float32, device=device, seed=3)
    blocks = BLOCKS * len(KvGroups.of(config))
    runner = GraphRunner(config, weights, num_blocks=blocks, token_budget=BUDGET, max_requests=REQUESTS)
    if device.type == "cuda":
        runner.capture()
    expected = search(made(config, Runner(config, weights, num_blocks=blocks), weights), 0)
    assert len({tuple(each) for each in expected}) == 3
    assert search(made(config, runner, weights), 2) == expected


@pytest.fixture
def runner(triton_backend: None, device: torch.device) -> GraphRunner:
    weights = load(resolve("dummy:tiny", cache_dir=Path("unused")), TINY, dtype=torch.float32, device=device, seed=3)
    runner = GraphRunner(TINY, weights, num_blocks=BLOCKS, token_budget=BUDGET, max_requests=REQUESTS)
    if device.type == "cuda":
        runner.capture()
    return runner


def over(runner: GraphRunner) -> Engine:
    return made(TINY, runner, runner.model.weights)


def start(engine: Engine, name: str, prompt: list[int], **wishes: Any) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, **wishes)
    lease = engine.try_reserve(len(prompt) + 5)
    assert lease is not None
    engine.add(RequestId(name), prompt, sampling, lease=lease)


def test_unusable_logits_in_flight_spare_a_neighbour_that_is_computed_at_once(runner: GraphRunner) -> None:
    runner.model.weights.embed[1] = torch.nan
    engine = over(runner)
    start(engine, "bad", [1, 2, 3])
    engine.step()
    start(engine, "penalised", [4, 5, 6], repetition_penalty=1.2)
    ended: dict[str, EngineError | None] = {}
    while engine.has_work:
        ended |= {done.request_id: done.error for done in engine.step().progress if done.ended}
    assert isinstance(ended.pop(RequestId("bad")), NumericalError)
    assert ended == {"penalised": None}
    assert engine.pool.free == engine.pool.total


def test_only_steps_without_a_librarys_products_overlap(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, bool] = {}
    forward = runner.model.forward

    def watched(batch: Batch, pool: Tensor, tick: Callable[[], None]) -> Tensor:
        seen[len(batch.token_ids)] = kernels.kernels_may_overlap()
        return forward(batch, pool, tick)

    monkeypatch.setattr(runner.model, "forward", watched)
    monkeypatch.setattr(runner, "_graphs", {})
    engine = over(runner)
    for index, length in enumerate((1, 9, 28)):
        start(engine, str(index), list(range(length)))
        while engine.has_work:
            engine.step()
    assert seen == {1: True, 16: True, 32: False}


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # interpreted
def test_a_step_of_spoilt_numbers_leaves_nothing_behind(runner: GraphRunner) -> None:
    """Whatever a shape's graph reads, it has written itself."""
    prompts = [[token % 100 + 2 for token in range(length)] for length in (1, 9, 16, 28, 32)]
    prompts += [[*prompt, 2] for prompt in prompts[:2]]
    expected = [tokens_of(over(runner), f"before {number}", prompt) for number, prompt in enumerate(prompts)]
    for number, prompt in enumerate(prompts):
        runner.model.weights.embed[1] = torch.nan
        assert tokens_of(over(runner), f"bad {number}", [1] * len(prompt)) == []
        assert tokens_of(over(runner), f"after {number}", prompt) == expected[number]


def tokens_of(engine: Engine, name: str, prompt: list[int]) -> list[int]:
    """What a request alone gets; what came before an error, where it ends in one."""
    start(engine, name, prompt)
    tokens: list[int] = []
    while engine.has_work:
        for done in engine.step().progress:
            tokens += done.token_ids
    return tokens


def test_a_scored_prompt_decodes_behind_graphs_as_any_other(runner: GraphRunner) -> None:
    engine = over(runner)
    start(engine, "scored", list(range(20)), prompt_logprobs=1)
    scores: list[TokenLogprob] = []
    shapes: list[StepShape | None] = []
    while engine.has_work:
        runner.last_shape = None
        for done in engine.step().progress:
            scores += done.prompt_logprobs
        shapes.append(runner.last_shape)
    assert len(scores) == 19
    # The prompt; then five decodes, one of them in flight when the prompt's token is told; then nothing is launched.
    assert shapes == [None, *[StepShape(1, 1, decodes=True)] * 5, None]


def test_block_tables_that_outgrow_a_steps_staging_arrive_all_the_same(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most_entries in (TABLE_ENTRIES, 2):
        monkeypatch.setattr(graph_runner, "TABLE_ENTRIES", most_entries)
        engine = over(runner)
        start(engine, f"long {most_entries}", list(range(60)))
        tokens: list[int] = []
        while engine.has_work:
            for done in engine.step().progress:
                tokens += done.token_ids
        found.append(tokens)
    assert len(found[0]) == 6
    assert found[0] == found[1]
