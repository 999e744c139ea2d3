"""Steps launched before the last one's tokens are known: the same tokens, and no block given away too early."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.engine import Engine
from paceline.engine.request import Progress
from paceline.engine.runner import Runner
from paceline.engine.weights import Weights, load
from paceline.types import FinishReason, RequestId, SamplingParams

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def weights() -> Weights:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    return load(source, TINY, dtype=torch.float32, device="cpu", seed=3)


def engine(weights: Weights, *, depth: int, num_blocks: int = 64, token_budget: int = 48) -> Engine:
    runner = Runner(TINY, weights, num_blocks=num_blocks, depth=depth)
    return Engine(TINY, weights, num_blocks=num_blocks, token_budget=token_budget, runner=runner)


def samplings(draw: random.Random) -> SamplingParams:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": draw.randrange(2**63)},
        {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(2**63), "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 3},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    stops = tuple(draw.sample(range(TINY.vocab_size), 40))
    return SamplingParams(max_tokens=draw.randint(1, 20), stop_token_ids=stops, ignore_eos=True, **draw.choice(kinds))


def answers(made: Engine, seed: int, *, aborts: bool) -> dict[str, list[Progress]]:
    """A random workload's progress by request; who is aborted has none."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(TINY.vocab_size), k=draw.randint(1, 60)) for _ in range(16)]
    waiting = [(str(index), prompt, samplings(draw)) for index, prompt in enumerate(prompts)]
    to_abort = {name for name, _, _ in draw.sample(waiting, 5)} if aborts else set()
    found: dict[str, list[Progress]] = {}
    while waiting or made.has_work:
        while waiting:
            name, prompt, sampling = waiting[0]
            lease = made.try_reserve(len(prompt) + sampling.max_tokens - 1, upfront_tokens=len(prompt), prompt=prompt)
            if lease is None:
                break
            made.add(RequestId(name), prompt, sampling, lease=lease)
            waiting.pop(0)
        for done in made.step().progress:
            found.setdefault(done.request_id, []).append(done)
        for name in sorted(to_abort):
            if name in found and made.abort(RequestId(name)):
                to_abort.remove(name)
                found[name] = []
    return {name: progress for name, progress in found.items() if progress}


def ids(progress: list[Progress]) -> list[int]:
    return [token_id for done in progress for token_id in done.token_ids]


@pytest.mark.parametrize("num_blocks", [64, 10])
@pytest.mark.parametrize("seed", range(6))
def test_an_overlapped_engine_gives_the_same_tokens_and_all_blocks_back(
    weights: Weights, seed: int, num_blocks: int
) -> None:
    alone, overlapped = (engine(weights, depth=depth, num_blocks=num_blocks) for depth in (0, 1))
    expected, found = (answers(made, seed, aborts=False) for made in (alone, overlapped))
    assert {name: ids(progress) for name, progress in found.items()} == {
        name: ids(progress) for name, progress in expected.items()
    }
    assert {name: progress[-1].finish_reason for name, progress in found.items()} == {
        name: progress[-1].finish_reason for name, progress in expected.items()
    }
    assert overlapped.pool.free == overlapped.pool.total
    assert overlapped.stats.output_tokens == alone.stats.output_tokens


@pytest.mark.parametrize("seed", range(6))
def test_requests_aborted_in_flight_leave_no_trace(weights: Weights, seed: int) -> None:
    made = engine(weights, depth=1, num_blocks=12)
    found = answers(made, seed, aborts=True)
    assert all(progress[-1].ended for progress in found.values())
    assert made.pool.free == made.pool.total
    assert not made.has_work


def test_the_next_step_is_launched_before_the_last_ones_token_is_told(weights: Weights) -> None:
    made = engine(weights, depth=1)
    lease = made.try_reserve(10)
    assert lease is not None
    made.add(RequestId("a"), [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), lease=lease)
    assert made.step().progress == []
    assert made.in_flight
    [first] = made.step().progress
    assert (first.computed, len(first.token_ids)) == (3, 1)
    [second] = made.step().progress
    assert second.computed == 4


def test_blocks_that_a_step_in_flight_writes_to_are_not_given_away(weights: Weights) -> None:
    made = engine(weights, depth=1, num_blocks=4)
    lease = made.try_reserve(40)
    assert lease is not None
    made.add(RequestId("a"), list(range(30)), SamplingParams(max_tokens=8, temperature=0.0), lease=lease)
    made.step()
    used = made.pool.used
    assert made.abort(RequestId("a"))
    assert made.pool.used == used, "a peer's write could land in them before the step's"
    assert made.step().progress == []
    assert made.pool.free == made.pool.total


def test_a_token_that_ends_a_request_makes_the_step_behind_it_void(weights: Weights) -> None:
    reference = engine(weights, depth=0)
    lease = reference.try_reserve(20)
    assert lease is not None
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    reference.add(RequestId("a"), [5, 6, 7], sampling, lease=lease)
    tokens: list[int] = []
    while reference.has_work:
        tokens += ids(reference.step().progress)
    stop = next(token for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
    made = engine(weights, depth=1)
    lease = made.try_reserve(20)
    assert lease is not None
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    made.add(RequestId("a"), [5, 6, 7], sampling, lease=lease)
    found: list[Progress] = []
    while made.has_work:
        found += made.step().progress
    assert ids(found) == tokens[: tokens.index(stop) + 1]
    assert found[-1].finish_reason is FinishReason.STOP
    assert made.pool.free == made.pool.total
