"""The engine over a tiny random model: one result however it is cut, every block back, both tiers' policies."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.engine import Engine
from paceline.engine.request import Progress
from paceline.engine.weights import Weights, load
from paceline.errors import EngineError, NumericalError
from paceline.types import BLOCK_TOKENS, GROWTH_BLOCKS, FinishReason, RequestId, SamplingParams, blocks_for

TINY = SHAPES["tiny"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def weights() -> Weights:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    return load(source, TINY, dtype=torch.float32, device="cpu", seed=3)


def engine(weights: Weights, *, num_blocks: int = 64, token_budget: int = 512) -> Engine:
    return Engine(TINY, weights, num_blocks=num_blocks, token_budget=token_budget)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(TINY.vocab_size), k=length)


def start(
    made: Engine, name: str, tokens: Sequence[int], sampling: SamplingParams = GREEDY, output: Sequence[int] = ()
) -> None:
    lease = made.try_reserve(len(tokens) + sampling.max_tokens - 1, upfront_tokens=len(tokens))
    assert lease is not None
    made.add(RequestId(name), tokens, sampling, lease=lease, output=output)


def finish(made: Engine) -> dict[str, list[Progress]]:
    """Steps until nothing is left; each request's progress by its name."""
    seen: dict[str, list[Progress]] = defaultdict(list)
    while made.has_work:
        for done in made.step().progress:
            seen[done.request_id].append(done)
    return seen


def tokens_of(seen: Mapping[str, list[Progress]]) -> dict[str, list[int]]:
    return {name: [token for done in steps for token in done.token_ids] for name, steps in seen.items()}


def answers(
    weights: Weights, prompts: Mapping[str, Sequence[int]], sampling: SamplingParams, **made: int
) -> dict[str, list[int]]:
    one = engine(weights, **made)
    for name, tokens in prompts.items():
        start(one, name, tokens, sampling)
    found = tokens_of(finish(one))
    assert (one.pool.free, one.pool.committed) == (one.pool.total, 0)
    return found


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_the_same_alone_and_in_any_batch_and_chunking(weights: Weights, sampling: SamplingParams) -> None:
    prompts = {str(length): prompt(length) for length in (1, 2, 15, 16, 17, 33, 64, 130)}
    alone = {name: answers(weights, {name: tokens}, sampling)[name] for name, tokens in prompts.items()}
    for token_budget in (1, 7, 64, 512):
        assert answers(weights, prompts, sampling, token_budget=token_budget) == alone, token_budget


def test_tokens_do_not_hang_on_where_the_blocks_lie(weights: Weights) -> None:
    expected = answers(weights, {"a": prompt(50)}, GREEDY)
    made = engine(weights)
    leases = [made.pool.lease(1) for _ in range(made.pool.total)]
    for lease in leases[::-2]:
        lease.release()
    start(made, "a", prompt(50))
    assert tokens_of(finish(made)) == expected
    assert made.pool.free == made.pool.total // 2


def test_requests_that_come_and_go_all_end_with_their_own_tokens(weights: Weights) -> None:
    chance = random.Random(5)
    waiting = {str(index): prompt(chance.randint(1, 90), index) for index in range(40)}
    expected = {name: answers(weights, {name: tokens}, DRAWN)[name] for name, tokens in waiting.items()}
    made = engine(weights, num_blocks=24, token_budget=48)
    found: dict[str, list[int]] = defaultdict(list)
    queue = list(waiting)
    while queue or made.has_work:
        while queue:
            tokens = waiting[queue[0]]
            lease = made.try_reserve(len(tokens) + DRAWN.max_tokens - 1, upfront_tokens=len(tokens))
            if lease is None:
                break
            made.add(RequestId(queue.pop(0)), tokens, DRAWN, lease=lease)
        for done in made.step().progress:
            found[done.request_id] += done.token_ids
        assert made.pool.committed <= made.pool.total
    assert found == expected
    assert (made.pool.free, made.pool.committed) == (24, 0)
    assert made.stats.requests_finished == 40


def test_a_prefill_policy_computes_the_prompt_samples_once_and_holds_its_blocks(weights: Weights) -> None:
    made = engine(weights, token_budget=16)
    lease = made.try_reserve(40)
    assert lease is not None
    made.add(RequestId("a"), prompt(40), GREEDY, lease=lease, hold=True, stop_after=1)
    steps = finish(made)["a"]
    assert [done.computed for done in steps] == [16, 32, 40]
    assert [done.ended for done in steps] == [False, False, True]
    assert (len(steps[-1].token_ids), steps[-1].finish_reason) == (1, None)
    assert (made.stats.prompt_tokens_computed, made.stats.output_tokens) == (40, 1)
    assert made.pool.used == blocks_for(40)
    made.release(RequestId("a"))
    assert made.pool.free == made.pool.total
    with pytest.raises(EngineError, match="holds no blocks"):
        made.release(RequestId("a"))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("length", [1, 16, 45])
def test_a_decode_goes_on_from_blocks_that_another_engine_computed(
    weights: Weights, sampling: SamplingParams, length: int
) -> None:
    expected = answers(weights, {"a": prompt(length)}, sampling)["a"]
    first, second = engine(weights, token_budget=16), engine(weights)
    second.pool.lease(5)  # so that the blocks have other numbers there
    source, target = first.try_reserve(length), second.try_reserve(length + 11, upfront_tokens=length)
    assert source is not None and target is not None
    first.add(RequestId("a"), prompt(length), sampling, lease=source, hold=True, stop_after=1)
    token = tokens_of(finish(first))["a"]
    second.runner.pool[target.blocks] = first.runner.pool[source.blocks]
    second.add(RequestId("a"), prompt(length), sampling, lease=target, computed=length, output=token)
    assert token + tokens_of(finish(second))["a"] == expected
    assert second.stats.prompt_tokens_computed == 0


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_replay_goes_on_where_the_output_ends(weights: Weights, sampling: SamplingParams) -> None:
    expected = answers(weights, {"a": prompt(20)}, sampling)["a"]
    made = engine(weights, token_budget=9)
    start(made, "a", prompt(20), sampling, output=expected[:5])
    seen = finish(made)
    assert tokens_of(seen)["a"] == expected[5:]
    assert seen["a"][-1].finish_reason is FinishReason.LENGTH


def test_a_stop_id_ends_the_request_and_is_part_of_its_output(weights: Weights) -> None:
    expected = answers(weights, {"a": prompt(20)}, DRAWN)["a"]
    stop = expected[4]
    sampling = SamplingParams(
        max_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True, stop_token_ids=(stop,)
    )
    made = engine(weights)
    start(made, "a", prompt(20), sampling)
    last = finish(made)["a"][-1]
    assert (last.token_ids, last.finish_reason) == ((stop,), FinishReason.STOP)
    assert made.stats.output_tokens == expected.index(stop) + 1


def test_an_aborted_request_is_heard_of_no_more_and_gives_its_blocks_back(weights: Weights) -> None:
    made = engine(weights, token_budget=16)
    start(made, "a", prompt(40))
    start(made, "b", prompt(5))
    made.step()
    assert made.abort(RequestId("a"))
    assert not made.abort(RequestId("a"))
    assert set(finish(made)) == {"b"}
    assert (made.pool.free, made.pool.committed, made.stats.requests_aborted) == (64, 0, 1)


def test_an_aborted_request_that_holds_keeps_its_blocks_until_they_are_released(weights: Weights) -> None:
    made = engine(weights, token_budget=16)
    lease = made.try_reserve(40)
    assert lease is not None
    made.add(RequestId("a"), prompt(40), GREEDY, lease=lease, hold=True, stop_after=1)
    made.step()
    with pytest.raises(EngineError, match="holds no blocks"):
        made.release(RequestId("a"))
    made.abort(RequestId("a"))
    assert made.pool.used == 3
    made.release(RequestId("a"))
    assert made.pool.free == made.pool.total


def test_blocks_are_taken_as_the_output_grows_and_a_few_are_expected_from_the_start(weights: Weights) -> None:
    made = engine(weights, num_blocks=6)
    long = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    start(made, "a", prompt(10), long)
    assert (made.pool.used, made.pool.committed) == (1, 1 + GROWTH_BLOCKS)
    assert made.try_reserve(17) is None
    assert made.load.headroom_blocks == 1
    assert len(tokens_of(finish(made))["a"]) == 80
    assert made.pool.free == 6


def test_the_load_tells_who_waits_who_runs_and_what_is_left_to_compute(weights: Weights) -> None:
    made = engine(weights, token_budget=16)
    start(made, "a", prompt(20))
    start(made, "b", prompt(30))
    made.step()
    load = made.load
    assert (load.running, load.waiting, load.pending_prompt_tokens) == (1, 1, 34)
    assert (load.total_blocks, load.committed_blocks) == (64, blocks_for(31) + blocks_for(41))


def test_numbers_left_in_freed_blocks_never_reach_their_next_owner(weights: Weights) -> None:
    expected = answers(weights, {"a": prompt(21), "b": prompt(5), "c": prompt(100)}, GREEDY)
    for token_budget in (512, 7):
        made = engine(weights, token_budget=token_budget)
        made.runner.pool.fill_(torch.nan)
        for name, length in (("a", 21), ("b", 5), ("c", 100)):
            start(made, name, prompt(length))
        assert tokens_of(finish(made)) == expected


def test_a_request_with_broken_kv_fails_alone(weights: Weights) -> None:
    expected = answers(weights, {"good": prompt(30)}, GREEDY)["good"]
    made = engine(weights)
    start(made, "good", prompt(30))
    lease = made.try_reserve(10 + 11)
    assert lease is not None
    made.runner.pool[lease.blocks] = torch.nan
    made.add(RequestId("bad"), prompt(10), GREEDY, lease=lease, computed=10, output=[1])
    seen = finish(made)
    (failed,) = seen["bad"]
    assert (failed.token_ids, failed.ended, failed.finish_reason) == ((), True, FinishReason.ERROR)
    assert isinstance(failed.error, NumericalError)
    assert tokens_of(seen)["good"] == expected
    assert (made.pool.free, made.stats.requests_failed) == (64, 1)


def test_spoilt_prompts_are_counted_until_one_is_sound(weights: Weights) -> None:
    made = engine(weights)
    seen = []
    for name, token_id in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        kept = weights.embed[token_id].clone()
        if token_id == 1:
            weights.embed[token_id] = torch.nan
        start(made, name, [token_id] * 5)
        finish(made)
        weights.embed[token_id] = kept
        seen.append(made.stats.spoilt_in_a_row)
    assert seen == [1, 2, 0, 1]


def test_a_request_that_began_well_does_not_count_as_spoilt_later(weights: Weights) -> None:
    made = engine(weights)
    start(made, "a", prompt(5))
    made.step()
    made.runner.pool.fill_(torch.nan)
    assert isinstance(finish(made)["a"][-1].error, NumericalError)
    assert made.stats.spoilt_in_a_row == 0


def test_the_choices_of_one_spoilt_request_count_as_one(weights: Weights) -> None:
    made = engine(weights)
    for choice in range(3):
        lease = made.try_reserve(10 + 11)
        assert lease is not None
        made.runner.pool[lease.blocks] = torch.nan
        name = RequestId(f"{choice}")
        made.add(name, prompt(10), GREEDY, lease=lease, computed=10, output=[1], choice=choice, counts=choice == 0)
    finish(made)
    assert (made.stats.requests_failed, made.stats.spoilt_in_a_row) == (3, 1)


def test_the_tick_is_called_in_every_layer(weights: Weights) -> None:
    made, ticks = engine(weights), []
    start(made, "a", prompt(5))
    made.step(lambda: ticks.append(1))
    assert len(ticks) >= TINY.num_layers


def test_limits_tell_what_a_step_reads(weights: Weights) -> None:
    limits = engine(weights).limits
    assert limits.step_weight_bytes == weights.step_nbytes
    kv_of_a_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4  # keys and values, in float32
    assert (limits.block_bytes, limits.windows) == (BLOCK_TOKENS * kv_of_a_token, (None,))


def test_an_idle_step_does_nothing(weights: Weights) -> None:
    made = engine(weights)
    assert (made.step().progress, made.step().num_tokens, made.stats.steps) == ([], 0, 0)


def test_the_pool_is_block_major_and_stays_where_it_is(weights: Weights) -> None:
    made = engine(weights, num_blocks=5)
    pool, address = made.runner.pool, made.runner.pool.data_ptr()
    assert pool.shape == (5, TINY.num_kv_heads, TINY.num_layers, 2, BLOCK_TOKENS, TINY.head_dim)
    assert pool.is_contiguous()
    assert made.runner.block_bytes * 5 == pool.nbytes
    start(made, "a", prompt(30))
    finish(made)
    assert made.runner.pool.data_ptr() == address


def test_requests_that_contradict_themselves_are_refused_before_they_reach_a_batch(weights: Weights) -> None:
    made = engine(weights)
    start(made, "a", prompt(5))
    lease = made.pool.lease(2)
    with pytest.raises(EngineError, match="is here already"):
        made.add(RequestId("a"), prompt(5), GREEDY, lease=lease)
    with pytest.raises(EngineError, match="needs 3 KV blocks and was lent 2"):
        made.add(RequestId("b"), prompt(40), GREEDY, lease=lease, computed=33)
    with pytest.raises(EngineError, match="needs 3 KV blocks and was lent 2"):
        made.add(RequestId("b"), prompt(40), GREEDY, lease=lease, hold=True, stop_after=1)
    with pytest.raises(EngineError, match="needs 65 KV blocks to its end, and the pool has 64"):
        made.add(RequestId("b"), prompt(64 * 16 - 10), GREEDY, lease=lease)
    with pytest.raises(EngineError, match="nothing to sample from"):
        made.add(RequestId("b"), prompt(5), GREEDY, lease=lease, computed=5)
    with pytest.raises(EngineError, match="nothing to sample from"):
        made.add(RequestId("b"), [], GREEDY, lease=lease)
    with pytest.raises(EngineError, match="has ended with the output"):
        made.add(RequestId("b"), prompt(5), GREEDY, lease=lease, output=[1] * 12)
    assert not lease.released
    assert [done.request_id for done in made.step().progress] == ["a"]
