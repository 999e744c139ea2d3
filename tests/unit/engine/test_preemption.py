"""Preemption: who makes room, who goes on, and that nobody can tell by the tokens. On real tiny engines, and in steps
without a model."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.memory import Memory
from paceline.engine.request import EngineRequest, Sampled
from paceline.engine.scheduler import Scheduler
from paceline.engine.weights import Weights, load
from paceline.types import RequestId, SamplingParams, blocks_for

TINY = SHAPES["tiny"]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def drawn(max_tokens: int, seed: int = 11) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.2, top_p=0.9, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def weights() -> Weights:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    return load(source, TINY, dtype=torch.float32, device="cpu", seed=3)


def engine(weights: Weights, *, num_blocks: int = 64, prefix_cache: bool = True, token_budget: int = 64) -> Engine:
    return Engine(
        TINY,
        weights,
        num_blocks=num_blocks,
        token_budget=token_budget,
        prefix_cache=prefix_cache,
        watermark=0.92,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(TINY.vocab_size), k=length)


def try_start(made: Engine, name: str, tokens: list[int], sampling: SamplingParams, priority: int = 0) -> bool:
    stored = len(tokens) + sampling.max_tokens - 1
    lease = made.try_reserve(stored, upfront_tokens=len(tokens), prompt=tokens)
    if lease is None:
        return False
    made.add(RequestId(name), tokens, sampling, lease=lease, priority=priority)
    return True


def finish(made: Engine, most: int = 5_000) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for _ in range(most):
        if not made.has_work:
            break
        for done in made.step().progress:
            assert done.error is None
            found[done.request_id] += done.token_ids
    assert not made.has_work
    assert made.pool.free == made.pool.total
    assert made.pool.expected == 0
    return found


def alone(weights: Weights, tokens: list[int], sampling: SamplingParams) -> list[int]:
    made = engine(weights, prefix_cache=False)
    assert try_start(made, "alone", tokens, sampling)
    return finish(made)["alone"]


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("make", [greedy, drawn])
def test_preempted_requests_end_with_the_tokens_of_undisturbed_ones(
    weights: Weights, make: type[SamplingParams], prefix_cache: bool
) -> None:
    prompts = {str(i): prompt(20 + 3 * i, i) for i in range(5)}
    sampling = make(90)
    expected = {name: alone(weights, tokens, sampling) for name, tokens in prompts.items()}
    made = engine(weights, num_blocks=22, prefix_cache=prefix_cache)
    for name, tokens in prompts.items():
        lease = made.pool.lease(blocks_for(len(tokens)))
        made.add(RequestId(name), tokens, sampling, lease=lease)
    assert finish(made) == expected
    assert made.stats.preemptions > 0
    assert made.stats.tokens_recomputed > 0
    assert made.stats.prompt_tokens_computed == sum(map(len, prompts.values()))
    assert made.stats.output_tokens == 5 * 90
    assert (made.stats.prefix_queried_tokens, made.stats.prefix_hit_tokens) == (sum(map(len, prompts.values())), 0)


def test_what_is_recomputed_is_mostly_found(weights: Weights) -> None:
    made = engine(weights, num_blocks=24)
    for name in "ab":
        assert try_start(made, name, prompt(100, ord(name)), greedy(130))
    assert len(finish(made)) == 2
    assert made.stats.preemptions > 0
    # Without a cache it would be 100 tokens and more for each.
    assert made.stats.tokens_recomputed <= 64 * made.stats.preemptions


def test_the_lowest_priority_makes_room_and_then_the_latest(weights: Weights) -> None:
    made = engine(weights, num_blocks=12)
    for name, priority in (("low", -1), ("first", 0), ("last", 0)):
        made.add(RequestId(name), prompt(60), greedy(60), lease=made.pool.lease(blocks_for(60)), priority=priority)
    order: list[str] = []
    while made.has_work:
        order += made.step().preempted
    assert order[:2] == ["low", "last"]
    assert "first" not in order


def test_a_preempted_request_comes_back_before_anyone_new(weights: Weights) -> None:
    made = engine(weights, num_blocks=12)
    for name in "ab":
        made.add(RequestId(name), prompt(60, ord(name)), greedy(60), lease=made.pool.lease(blocks_for(60)))
    while not made.step().preempted:
        pass
    assert made.load.headroom_blocks == 0
    assert made.load.waiting == 1
    assert not try_start(made, "new", prompt(5), greedy(5))
    assert set(finish(made)) == {"a", "b"}
    assert try_start(made, "new", prompt(5), greedy(5))


def test_a_lone_request_that_fits_the_pool_finishes_in_it(weights: Weights) -> None:
    made = engine(weights, num_blocks=10)
    sampling = greedy(10 * 16 - 100 + 1)
    assert try_start(made, "a", prompt(100), sampling)
    assert finish(made)["a"] == alone(weights, prompt(100), sampling)
    assert made.stats.preemptions == 0


def test_a_request_that_nobody_can_make_room_for_waits_without_being_computed(weights: Weights) -> None:
    """Its blocks are in the hands of a writer, who is never preempted: the loop sleeps until they come back."""
    made = engine(weights, num_blocks=10)
    assert try_start(made, "a", prompt(60), greedy(60))
    writers = made.pool.lease(5)
    steps = 0
    while made.has_work:
        made.step()
        steps += 1
    assert steps < 60
    assert made.load.running == 1
    assert not try_start(made, "new", prompt(5), greedy(5))
    writers.release()
    assert made.has_work
    assert len(finish(made)["a"]) == 60 - (steps - 1)


def test_an_aborted_request_that_was_preempted_is_gone(weights: Weights) -> None:
    made = engine(weights, num_blocks=12)
    for name in "ab":
        made.add(RequestId(name), prompt(60, ord(name)), greedy(60), lease=made.pool.lease(blocks_for(60)))
    while not (preempted := made.step().preempted):
        pass
    assert preempted == ("b",)
    assert made.abort(RequestId("b"))
    assert set(finish(made)) == {"a"}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_blocks=st.integers(4, 24), budget=st.sampled_from([4, 16, 64]))
def test_nobody_starves_and_every_request_ends_with_its_own_tokens(
    data: st.DataObject, num_blocks: int, budget: int
) -> None:
    """In virtual steps: the model is a function of the tokens so far, so any lost or doubled one shows."""
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(token_budget=budget, context_tokens=10_000, eos_token_ids=())
    memory = Memory(pool, scheduler, watermark=0.92, caching=True)
    fits = st.integers(1, 16 * num_blocks - 1).flatmap(
        lambda length: st.tuples(st.just(length), st.integers(1, min(80, 16 * num_blocks - length + 1)))
    )
    waiting = [
        (length, output, data.draw(st.integers(-1, 1)))
        for length, output in data.draw(st.lists(fits, min_size=1, max_size=8))
    ]
    made: list[EngineRequest] = []
    left = 40 * sum(length + output for length, output, _ in waiting) + 1_000
    while waiting or len(scheduler):
        left -= 1
        assert left > 0, "somebody starves"
        if waiting:
            length, output, priority = waiting[0]
            tokens = [7 * i % 50 for i in range(length)]
            lease = memory.admit(tokens, b"root", upfront=blocks_for(length), total=blocks_for(length + output - 1))
            if lease is not None:
                waiting.pop(0)
                request = EngineRequest(RequestId(str(len(made))), tokens, length, greedy(output), lease)
                request.priority, request.root = priority, b"root"
                request.begin(lease)
                scheduler.add(request)
                made.append(request)
        memory.resume()
        first = min(scheduler.requests, key=lambda each: each.rank, default=None)
        batch, preempted = memory.make_room(scheduler.next_batch())
        assert first is None or first.request_id not in preempted or scheduler.running == 0
        assert batch or not len(scheduler), "something always fits where nobody else holds blocks"
        tokens_of = [sum(chunk.request.tokens) % 50 for chunk in batch if chunk.samples]
        scheduler.launch(batch)
        for chunk, done in zip(batch, scheduler.commit(batch, Sampled(tokens_of)), strict=True):
            if done.token_ids:
                memory.publish(chunk.request)
            if done.ended:
                chunk.request.lease.release()
    assert (pool.free, pool.expected) == (num_blocks, 0)
    for request in made:
        expected = [7 * i % 50 for i in range(request.num_prompt)]
        for _ in range(request.sampling.max_tokens):
            expected.append(sum(expected) % 50)
        assert request.tokens == expected
