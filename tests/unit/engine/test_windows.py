"""Groups with a window: what slides out is free again, what is needed is never gone, and no token changes for it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.block_lease import BlockLease
from paceline.engine.engine import Engine
from paceline.engine.runner import Runner
from paceline.engine.weights import Weights, load
from paceline.prefix import block_hashes
from paceline.types import GROWTH_BLOCKS, RequestId, SamplingParams, blocks_for, blocks_in_groups

WINDOW = 24
BUDGET = 32
MIXED = msgspec.structs.replace(SHAPES["tiny"], num_layers=4, windows=(WINDOW, WINDOW, None, WINDOW))
PURE = msgspec.structs.replace(SHAPES["tiny"], windows=(WINDOW, WINDOW))
MODELS = {"mixed": MIXED, "pure": PURE}
MOST = blocks_for(WINDOW + BUDGET) + 1


@pytest.fixture(scope="module")
def weights() -> dict[str, Weights]:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    return {name: load(source, config, dtype=torch.float32, device="cpu", seed=3) for name, config in MODELS.items()}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(
    weights: dict[str, Weights], name: str, *, num_blocks: int = 400, prefix_cache: bool = True, depth: int = 0
) -> Engine:
    config = MODELS[name]
    runner = Runner(config, weights[name], num_blocks=num_blocks, depth=depth)
    return Engine(
        config,
        weights[name],
        num_blocks=num_blocks,
        token_budget=BUDGET,
        prefix_cache=prefix_cache,
        watermark=0.92,
        runner=runner,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, SHAPES["tiny"].vocab_size), k=length)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


DRAWN = SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, seed=11, ignore_eos=True)


def try_start(made: Engine, name: str, tokens: list[int], sampling: SamplingParams) -> BlockLease | None:
    stored = len(tokens) + sampling.max_tokens - 1
    lease = made.try_reserve(stored, upfront_tokens=len(tokens), prompt=tokens)
    if lease is not None:
        made.add(RequestId(name), tokens, sampling, lease=lease)
    return lease


def finish(made: Engine, most: int = 5_000) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for _ in range(most):
        if not made.has_work:
            break
        for done in made.step().progress:
            assert done.error is None
            found[done.request_id] += done.token_ids
    assert not made.has_work
    assert (made.pool.free, made.pool.expected) == (made.pool.total, 0)
    return found


def alone(weights: dict[str, Weights], name: str, tokens: list[int], sampling: SamplingParams) -> list[int]:
    made = engine(weights, name, prefix_cache=False)
    assert try_start(made, "alone", tokens, sampling)
    return finish(made)["alone"]


def live(lease: BlockLease) -> list[int]:
    return [len(table) - gone for table, gone in zip(lease.tables, lease.gone, strict=True)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_windowed_group_holds_no_more_than_a_window_and_a_step_fill(
    weights: dict[str, Weights], name: str, depth: int
) -> None:
    made = engine(weights, name, depth=depth)
    lease = try_start(made, "a", prompt(500), greedy(200))
    assert lease is not None
    windows = KvGroups.of(MODELS[name]).windows
    most = blocks_for(WINDOW + BUDGET * (1 + depth)) + 1
    held: list[int] = []
    while made.has_work:
        made.step()
        if lease.released:
            break
        for window, count in zip(windows, live(lease), strict=True):
            assert count <= (blocks_for(699) if window is None else most)
        held.append(made.pool.used)
    assert max(held) <= blocks_in_groups(699, made.limits.most_blocks)
    # While it decodes, a windowed table has what a window may span.
    settled = blocks_for(WINDOW) + 1
    assert held[-1] <= sum(blocks_for(699) if window is None else settled for window in windows)


def test_a_long_request_of_gemma_3_270m_takes_less_than_half_of_what_it_took() -> None:
    shape = msgspec.structs.replace(SHAPES["tiny"], num_layers=18, windows=(512, 512, 512, 512, 512, None) * 3)
    groups = KvGroups.of(shape)
    block_bytes = 2 * 16 * 256 * 4  # a layer's, in float32
    before = blocks_for(4_096) * 18 * block_bytes
    decoding = blocks_in_groups(4_096, groups.most_blocks(1)) * groups.layers * block_bytes
    computing = blocks_in_groups(4_096, groups.most_blocks(512)) * groups.layers * block_bytes
    assert (before, computing, decoding) == (150_994_944, 57_114_624, 41_877_504)


def test_a_request_is_admitted_by_its_windows_and_not_by_its_length(weights: dict[str, Weights]) -> None:
    made = engine(weights, "pure", num_blocks=10)
    assert (made.limits.most_blocks, made.limits.windows) == ((MOST,), (WINDOW,))
    lease = try_start(made, "a", prompt(600), greedy(100))
    assert lease is not None
    assert len(lease) == MOST
    assert finish(made)["a"] == alone(weights, "pure", prompt(600), greedy(100))


def test_a_prompt_that_is_computed_elsewhere_takes_what_its_next_token_reads(weights: dict[str, Weights]) -> None:
    made = engine(weights, "mixed")
    reserved = made.try_reserve_target(prompt(100), 100 + 200 - 1)
    assert reserved is not None
    held, missing = reserved
    # A token at 100 sees those from 77 on: blocks 4, 5 and 6.
    assert (len(held), len(missing), held.expected) == (0, 7 + 3 * 3, GROWTH_BLOCKS)
    assert [list(range(gone, len(table))) for gone, table in zip(missing.gone, missing.tables, strict=True)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [4, 5, 6],
        [4, 5, 6],
        [4, 5, 6],
    ]
    held.join(missing)
    assert held.blocks == [block for table, gone in zip(held.tables, held.gone, strict=True) for block in table[gone:]]
    held.release()
    assert (made.pool.free, made.pool.expected) == (made.pool.total, 0)


@pytest.mark.parametrize("sampling", [greedy(40), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("shared", [15, 16, 32, 47, 48, 96, 130, 199])
def test_a_hit_gives_the_tokens_of_a_prompt_that_is_computed_whole(
    weights: dict[str, Weights], name: str, shared: int, sampling: SamplingParams
) -> None:
    made = engine(weights, name)
    first, second = prompt(200), prompt(200)[:shared] + prompt(60, seed=1)
    assert try_start(made, "a", first, sampling)
    finish(made)
    lease = try_start(made, "b", second, sampling)
    assert lease is not None
    if name == "mixed":
        assert lease.shared == shared // 16
    else:  # what slid out before the first logits was never found to be sound
        assert lease.shared == (shared // 16 if shared > 192 else 0)
    assert finish(made)["b"] == alone(weights, name, second, sampling)


# A token at 176 sees those from 153 on, in block 9; one at 160 those from 137 on, in block 8.
@pytest.mark.parametrize(("hole", "reach"), [(8, 11), (9, 9), (10, 10)])
def test_a_hit_ends_where_a_window_is_whole(weights: dict[str, Weights], hole: int, reach: int) -> None:
    made = engine(weights, "mixed")
    tokens = prompt(200)
    assert try_start(made, "a", tokens, greedy(4))
    finish(made)
    block = made.pool.cache.get(block_hashes(tokens)[hole], 2)
    assert block is not None
    made.pool.forget([block])
    lease = try_start(made, "b", tokens[:190], greedy(30))
    assert lease is not None
    assert lease.shared == reach
    assert finish(made)["b"] == alone(weights, "mixed", tokens[:190], greedy(30))


def test_several_requests_read_the_same_window_and_each_goes_on_with_its_own(
    weights: dict[str, Weights], name: str
) -> None:
    made = engine(weights, name)
    beginning = prompt(64)
    assert try_start(made, "warm", beginning + prompt(3), greedy(2))
    finish(made)
    prompts = {each: beginning + prompt(70, seed=ord(each)) for each in "abc"}
    for each, tokens in prompts.items():
        lease = try_start(made, each, tokens, DRAWN)
        assert lease is not None
        assert lease.shared == 4
    assert finish(made) == {each: alone(weights, name, tokens, DRAWN) for each, tokens in prompts.items()}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
def test_preempted_requests_end_with_the_tokens_of_undisturbed_ones(
    weights: dict[str, Weights], name: str, prefix_cache: bool, depth: int
) -> None:
    prompts = {str(i): prompt(20 + 13 * i, i) for i in range(6)}
    sampling = greedy(90)
    num_blocks = 60 if name == "mixed" else 9
    made = engine(weights, name, num_blocks=num_blocks, prefix_cache=prefix_cache, depth=depth)
    for each, tokens in prompts.items():
        made.add(RequestId(each), tokens, sampling, lease=made.pool.lease(0))
    assert finish(made) == {each: alone(weights, name, tokens, sampling) for each, tokens in prompts.items()}
    assert made.stats.preemptions > 0
    assert made.stats.tokens_recomputed > 0


@pytest.mark.parametrize("length", [40, 48, 100])
def test_forks_of_a_prompt_go_on_each_for_itself(weights: dict[str, Weights], name: str, length: int) -> None:
    made = engine(weights, name)
    tokens = prompt(length)
    lease = made.try_reserve(length, prompt=tokens)
    assert lease is not None
    sampling = msgspec.structs.replace(DRAWN, n=3)
    made.add(RequestId("p"), tokens, sampling, lease=lease, hold=True, stop_after=1, fanout=3)
    firsts: Sequence[int] = ()
    while not firsts:
        for done in made.step().progress:
            firsts = done.token_ids
    lease = made.take(RequestId("p"))
    leases = [lease, *(made.fork(lease, length) for _ in range(2))]
    for choice, (each, first) in enumerate(zip(leases, firsts, strict=True)):
        made.add(RequestId(str(choice)), tokens, sampling, lease=each, computed=length, output=[first], choice=choice)
    found = finish(made)
    for choice, first in enumerate(firsts):
        apart = engine(weights, name, prefix_cache=False)
        own = apart.try_reserve(length + 39, upfront_tokens=length)
        assert own is not None
        apart.add(RequestId("x"), tokens, sampling, lease=own, choice=choice)
        assert finish(apart)["x"] == [first, *found[str(choice)]]


@pytest.mark.parametrize("steps", [6, 40], ids=["before its first token", "while it decodes"])
def test_what_a_failed_request_had_slid_out_is_found_no_more(
    weights: dict[str, Weights], name: str, steps: int
) -> None:
    made = engine(weights, name)
    lease = try_start(made, "a", prompt(200), greedy(60))
    assert lease is not None
    for _ in range(steps):
        made.step()
    assert (made.pool.cache.idle > 0) == (name == "mixed" or steps > 10)
    made.runner.pool[lease.tables[0]] = torch.nan
    while made.has_work:
        made.step()
    assert made.stats.requests_failed == 1
    assert (len(made.pool.cache), made.pool.free) == (0, made.pool.total)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), extra=st.integers(0, 12), depth=st.sampled_from([0, 1]))
def test_prompts_that_were_admitted_to_be_held_are_computed_in_any_pool(
    data: st.DataObject, seed: int, extra: int, depth: int, weights: dict[str, Weights]
) -> None:
    """As on a prefill worker: none is ever preempted, and so each has from the start what it takes to end."""
    config: ModelConfig = MIXED
    chance = random.Random(seed)
    beginnings = [chance.choices(range(3, 500), k=96) for _ in range(2)]
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 96), st.integers(1, 100)), min_size=1, max_size=8))
    waiting = [chance.choice(beginnings)[:shared] + chance.choices(range(3, 500), k=own) for shared, own in lengths]
    groups = KvGroups.of(config)
    largest = max(blocks_in_groups(len(each), groups.most_blocks(BUDGET * (1 + depth))) for each in waiting)
    made = engine(weights, "mixed", num_blocks=largest + extra, depth=depth)
    left, steps, number = list(waiting), 0, 0
    while left or made.has_work:
        steps += 1
        assert steps < 500, f"nobody goes on: {made.load}"
        if left and (lease := made.try_reserve(len(left[0]), prompt=left[0])) is not None:
            made.add(RequestId(str(number)), left.pop(0), greedy(5), lease=lease, hold=True, stop_after=1)
            number += 1
        output = made.step()
        assert not output.preempted
        for done in output.progress:
            if done.ended:
                made.release(done.request_id)
    assert number == len(waiting)
    assert (made.pool.free, made.pool.expected) == (made.pool.total, 0)
