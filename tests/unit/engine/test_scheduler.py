"""Batches under a budget, and what a step's result does to the requests. Pure values, no model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.block_pool import BlockPool
from paceline.engine.finish import finish_reason
from paceline.engine.request import Chunk, EngineRequest, Progress, Sampled
from paceline.engine.scheduler import Scheduler
from paceline.errors import NumericalError
from paceline.types import FinishReason, RequestId, SamplingParams

EOS = 2
POOL = BlockPool(0)


def request(
    name: str, prompt: int, *, output: int = 0, computed: int = 0, stop_after: int | None = None, max_tokens: int = 8
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = [5] * (prompt + output)
    return EngineRequest(
        RequestId(name), tokens, prompt, sampling, POOL.lease(0), computed=computed, stop_after=stop_after
    )


def scheduler(*requests: EngineRequest, budget: int = 16, most: int | None = None) -> Scheduler:
    made = Scheduler(token_budget=budget, context_tokens=1_000, eos_token_ids=(EOS,), max_requests=most)
    for each in requests:
        made.add(each)
    return made


def shape(batch: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in batch]


def step(made: Scheduler, token_id: int = 7) -> list[Progress]:
    batch = made.next_batch()
    made.launch(batch)
    return made.commit(batch, Sampled([token_id] * sum(chunk.samples for chunk in batch)))


def test_an_idle_scheduler_has_an_empty_batch() -> None:
    assert scheduler().next_batch() == []


def test_decodes_go_first_and_a_prompt_takes_what_is_left() -> None:
    made = scheduler(request("prompt", 40), request("decode", 3, output=1, computed=3))
    assert shape(made.next_batch()) == [("decode", 3, 1), ("prompt", 0, 15)]


def test_no_more_requests_share_a_batch_than_may() -> None:
    made = scheduler(*[request(f"p{number}", 2) for number in range(5)], most=3)
    assert [chunk.request.request_id for chunk in made.next_batch()] == ["p0", "p1", "p2"]


def test_decodes_past_the_limit_take_turns_and_leave_a_place_for_a_prompt() -> None:
    decodes = [request(f"d{number}", 3, output=1, computed=3, max_tokens=100) for number in range(5)]
    made = scheduler(*decodes, request("prompt", 40), most=3)
    served = []
    for _ in range(5):
        batch = made.next_batch()
        assert len(batch) == 3
        assert batch[-1].request.request_id == "prompt"
        served += [chunk.request.request_id for chunk in batch[:-1]]
        made.launch(batch)
        made.commit(batch, Sampled([7] * sum(chunk.samples for chunk in batch)))
        if "prompt" not in {each.request_id for each in made.requests if each.remaining > 1}:
            break
    assert set(served) >= {"d0", "d1", "d2", "d3"}


def test_prompts_share_a_batch_in_order_of_arrival() -> None:
    made = scheduler(request("a", 6), request("b", 6), request("c", 6), request("d", 6))
    assert shape(made.next_batch()) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]


def test_a_long_prompt_is_computed_in_chunks_and_samples_in_the_last() -> None:
    made = scheduler(request("a", 40))
    seen = []
    for _ in range(3):
        batch = made.next_batch()
        seen.append((shape(batch), batch[0].samples))
        made.launch(batch)
        made.commit(batch, Sampled([7] if batch[0].samples else []))
    assert seen == [([("a", 0, 16)], False), ([("a", 16, 16)], False), ([("a", 32, 8)], True)]
    assert shape(made.next_batch()) == [("a", 40, 1)]


def test_a_landed_hand_off_is_a_decode_at_once() -> None:
    made = scheduler(request("landed", 100, output=1, computed=100))
    assert shape(made.next_batch()) == [("landed", 100, 1)]


def test_a_replay_computes_prompt_and_output_together() -> None:
    made = scheduler(request("replay", 4, output=3))
    batch = made.next_batch()
    assert shape(batch) == [("replay", 0, 7)]
    assert batch[0].samples


def test_more_decodes_than_budget_take_turns() -> None:
    made = scheduler(*(request(name, 1, output=1, computed=1) for name in "abc"), budget=2)
    served = []
    for _ in range(3):
        served += [done.request_id for done in step(made)]
    assert sorted(served) == ["a", "a", "b", "b", "c", "c"]


def test_a_request_ends_at_max_tokens() -> None:
    made = scheduler(request("a", 2, max_tokens=2))
    (first,), (second,) = step(made), step(made)
    assert (first.token_ids, first.ended, first.computed) == ((7,), False, 2)
    assert (second.ended, second.finish_reason, second.computed) == (True, FinishReason.LENGTH, 3)
    assert len(made) == 0


def test_a_request_cut_by_its_policy_ends_without_a_reason() -> None:
    (done,) = step(scheduler(request("a", 2, stop_after=1)))
    assert (done.token_ids, done.ended, done.finish_reason) == ((7,), True, None)


def test_a_first_token_that_ends_the_request_is_known_to_the_policy_that_cuts_it() -> None:
    (stopped,) = step(scheduler(request("a", 2, stop_after=1)), token_id=EOS)
    (full,) = step(scheduler(request("a", 2, stop_after=1, max_tokens=1)))
    assert stopped.finish_reason is FinishReason.STOP
    assert full.finish_reason is FinishReason.LENGTH


def test_a_bad_row_fails_its_own_request_alone() -> None:
    made = scheduler(request("good", 2), request("bad", 2), request("other", 2))
    made.launch(batch := made.next_batch())
    good, bad, other = made.commit(batch, Sampled([7, 8, 9], bad=frozenset({1})))
    assert (good.token_ids, other.token_ids) == ((7,), (9,))
    assert (bad.token_ids, bad.ended, bad.finish_reason) == ((), True, FinishReason.ERROR)
    assert isinstance(bad.error, NumericalError)
    assert [each.request_id for each in made.requests] == ["good", "other"]


def test_sampled_tokens_go_to_the_chunks_that_sample() -> None:
    made = scheduler(request("short", 4), request("long", 40))
    made.launch(batch := made.next_batch())
    short, long = made.commit(batch, Sampled([7]))
    assert (short.token_ids, long.token_ids, long.computed) == ((7,), (), 12)


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=8),
    budget=st.integers(1, 40),
)
def test_every_request_ends_with_all_its_tokens_and_no_step_exceeds_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    requests = [request(str(index), prompt, max_tokens=tokens) for index, (prompt, tokens) in enumerate(lengths)]
    made = scheduler(*requests, budget=budget)
    for _ in range(sum(prompt + tokens for prompt, tokens in lengths)):
        batch = made.next_batch()
        assert 0 < sum(chunk.num_tokens for chunk in batch) <= budget
        assert len({chunk.request.request_id for chunk in batch}) == len(batch)
        made.launch(batch)
        made.commit(batch, Sampled([7] * sum(chunk.samples for chunk in batch)))
        if not len(made):
            break
    assert len(made) == 0
    assert [(each.num_output, each.remaining) for each in requests] == [(tokens, 1) for _, tokens in lengths]


@pytest.mark.parametrize(
    ("token_id", "num_output", "sampling", "reason"),
    [
        (7, 1, SamplingParams(max_tokens=8), None),
        (EOS, 1, SamplingParams(max_tokens=8), FinishReason.STOP),
        (EOS, 1, SamplingParams(max_tokens=8, ignore_eos=True), None),
        (9, 1, SamplingParams(max_tokens=8, stop_token_ids=(9,)), FinishReason.STOP),
        (9, 1, SamplingParams(max_tokens=8, stop_token_ids=(9,), ignore_eos=True), FinishReason.STOP),
        (7, 8, SamplingParams(max_tokens=8), FinishReason.LENGTH),
        (EOS, 8, SamplingParams(max_tokens=8), FinishReason.STOP),
        (7, 10, SamplingParams(max_tokens=50), FinishReason.LENGTH),  # 90 + 10 fill the context
        (7, 9, SamplingParams(max_tokens=50), None),
    ],
)
def test_a_generation_ends_by_one_rule(
    token_id: int, num_output: int, sampling: SamplingParams, reason: FinishReason | None
) -> None:
    found = finish_reason(
        token_id, num_prompt=90, num_output=num_output, sampling=sampling, eos_token_ids=(EOS,), context_tokens=100
    )
    assert found is reason
