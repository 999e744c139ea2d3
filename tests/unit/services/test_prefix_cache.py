"""Prompts that are partly cached, on their way into a decode engine, and requests there that make room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.engine.request import StepOutput
from paceline.prefix import block_hashes
from paceline.services.decode.messages import Over, Redirected
from paceline.services.decode.reservation_states import State
from paceline.services.prefill.messages import PrefillFailed
from paceline.testing.pair import Pair
from paceline.types import BLOCK_TOKENS, FinishReason, ReservationId, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, seed=42, ignore_eos=True)
PROMPT = [7 * i % 500 + 3 for i in range(100)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def hand_over(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, *, salt: str = "") -> int:
    """Tokens that the decode worker held already."""
    pair.reserve(name, prompt, sampling, salt=salt)
    pair.decode.round()
    pair.start(name, prompt, sampling, salt=salt)
    granted = pair.claim(name)
    assert len(granted.blocks) == -(-len(prompt) // BLOCK_TOKENS) - granted.held_tokens // BLOCK_TOKENS
    return granted.held_tokens


def serve(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, *, salt: str = "") -> list[int]:
    """The answer of a hand-over to its end."""
    hand_over(pair, name, prompt, sampling, salt=salt)
    pair.pump_until_idle()
    return pair.tokens(name)


def alone(pair: Pair, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    """The answer of a decode worker that computes the whole prompt itself, cached or not."""
    pair.reserve("alone", prompt, sampling, local=True, salt="alone")
    pair.pump_until_idle()
    pair.over("alone")
    return pair.tokens("alone")


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_prompt_that_comes_again_is_neither_computed_nor_sent_but_for_its_end(
    pair: Pair, sampling: SamplingParams
) -> None:
    first = serve(pair, "a", PROMPT, sampling)
    [cold] = pair.first_tokens()
    assert (cold.cached_tokens, pair.over("a").blocks_landed) == (0, 7)
    again = serve(pair, "b", PROMPT, sampling)
    [warm] = pair.first_tokens()
    over = pair.over("b")
    assert first == again == alone(pair, PROMPT, sampling)
    assert (warm.cached_tokens, over.cached_tokens, over.blocks_landed) == (96, 96, 1)
    assert pair.prefill.engine.stats.prompt_tokens_computed == 100 + 4


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 96])
def test_the_last_token_is_always_computed(pair: Pair, length: int) -> None:
    first = serve(pair, "a", PROMPT[:length])
    again = serve(pair, "b", PROMPT[:length])
    cached = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [each.cached_tokens for each in pair.first_tokens()] == [0, cached]
    assert first == again == alone(pair, PROMPT[:length])


def test_a_chat_goes_on_from_its_answer_on_the_decode_worker(pair: Pair) -> None:
    answer = serve(pair, "a", PROMPT[:60], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    second = PROMPT[:60] + answer + PROMPT[60:90]
    held = hand_over(pair, "b", second)
    pair.pump_until_idle()
    assert held == 80  # 89 of the first turn's tokens are stored
    [_, warm] = pair.first_tokens()
    assert warm.cached_tokens == 48  # the prefill worker never saw the answer
    assert pair.tokens("b") == alone(pair, second)


def test_a_prefill_worker_sends_blocks_that_it_had_cached(pair: Pair) -> None:
    pair.start("a", PROMPT, GREEDY)
    pair.pump(20)
    pair.abort_prefill("a")
    pair.pump_until_idle()
    assert hand_over(pair, "b", PROMPT) == 0
    pair.pump_until_idle()
    assert pair.first_tokens()[-1].cached_tokens == 96
    assert pair.over("b").blocks_landed == 7
    assert pair.tokens("b") == alone(pair, PROMPT)


def test_prompts_under_different_salts_share_nothing(pair: Pair) -> None:
    serve(pair, "a", PROMPT, salt="one")
    serve(pair, "b", PROMPT, salt="two")
    serve(pair, "c", PROMPT, salt="one")
    assert [each.cached_tokens for each in pair.first_tokens()] == [0, 0, 96]


def test_without_a_prefix_cache_nothing_is_found(tmp_path: Path) -> None:
    pair = Pair(tmp_path, prefix_cache=False)
    assert serve(pair, "a", PROMPT) == serve(pair, "b", PROMPT)
    assert [each.cached_tokens for each in pair.first_tokens()] == [0, 0]
    assert len(pair.prefill.engine.pool.cache) == len(pair.decode.engine.pool.cache) == 0


def test_two_requests_read_the_same_blocks_at_the_same_time(pair: Pair) -> None:
    serve(pair, "warm", PROMPT)
    used = pair.decode.load.free_blocks
    hand_over(pair, "a", PROMPT)
    hand_over(pair, "b", PROMPT)
    assert used - pair.decode.load.free_blocks == 6 + 2
    pair.pump_until_idle()
    assert pair.tokens("a") == pair.tokens("b") == alone(pair, PROMPT)


def test_blocks_in_quarantine_are_never_those_that_others_read(pair: Pair) -> None:
    serve(pair, "warm", PROMPT)
    hand_over(pair, "a", PROMPT + PROMPT[:40])
    pair.hub.hold = True
    pair.pump(2)
    pair.cancel("a")
    pair.pump(20)
    load = pair.decode.load
    assert load.quarantined_blocks == load.committed_blocks == 3
    assert hand_over(pair, "b", PROMPT) == 96
    pair.hub.hold = False
    pair.pump_until_idle()
    assert pair.tokens("b") == alone(pair, PROMPT)


def test_a_second_attempt_keeps_what_was_held(pair: Pair) -> None:
    serve(pair, "warm", PROMPT)
    hand_over(pair, "r", PROMPT + PROMPT[:40])
    pair.hub.fail_next = 1
    pair.pump(4)
    assert len(pair.take_prefill(PrefillFailed)) == 1
    pair.retarget("r")
    pair.decode.round()
    assert pair.take_decode(Redirected)[0].attempt == 2
    pair.start("r", PROMPT + PROMPT[:40], GREEDY, attempt=2)
    assert pair.claim("r", attempt=2).held_tokens == 96
    pair.pump_until_idle()
    over = pair.over("r")
    assert (over.attempts, over.cached_tokens) == (2, 96)
    assert pair.tokens("r") == alone(pair, PROMPT + PROMPT[:40])


def test_a_request_that_is_computed_on_the_decode_worker_computes_what_is_not_held(pair: Pair) -> None:
    serve(pair, "warm", PROMPT)
    hand_over(pair, "r", PROMPT + PROMPT[:40])
    pair.retarget("r", local=True)
    pair.pump_until_idle()
    over = pair.over("r")
    assert (over.prompt_tokens_computed, over.cached_tokens) == (44, 96)
    assert pair.tokens("r") == alone(pair, PROMPT + PROMPT[:40])


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_blocks_behind_unusable_logits_are_found_no_more_and_the_neighbour_is_untouched(pair: Pair, tier: str) -> None:
    """F56: on the side whose memory is broken, that request fails alone."""
    expected = alone(pair, PROMPT[:50])
    serve(pair, "warm", PROMPT)
    pair.first_tokens()
    loop = pair.prefill if tier == "prefill" else pair.decode
    [block] = loop.engine.pool.cache.find(_hashes(PROMPT, 1))
    loop.engine.runner.pool[block] = torch.nan
    hand_over(pair, "bad", PROMPT)
    hand_over(pair, "good", [400, *PROMPT[:49]])
    pair.pump(30)
    pair.cancel("bad")
    pair.abort_prefill("bad")
    pair.pump_until_idle()
    assert len(pair.tokens("good")) == 8
    if tier == "prefill":
        assert [each.failure.reason for each in pair.take_prefill(PrefillFailed)] == ["NUMERICAL_ERROR"]
    else:
        ends = {over.reservation_id: over for over in pair.take_decode(Over)}
        assert ends["bad"].failure.reason == "NUMERICAL_ERROR"
        assert ends["good"].finish is FinishReason.LENGTH
    assert loop.engine.stats.requests_failed == 1
    assert loop.engine.pool.cache.find(_hashes(PROMPT, 1)) == []
    pair.first_tokens()
    assert serve(pair, "again", PROMPT[:50]) == expected


def test_requests_that_make_room_give_the_tokens_of_an_undisturbed_run(tmp_path: Path) -> None:
    pair = Pair(tmp_path, decode_blocks=22, watermark=1.0)
    sampling = SamplingParams(max_tokens=150, temperature=1.3, top_p=0.9, seed=5, ignore_eos=True)
    prompts = {name: PROMPT[i : i + 40] for i, name in enumerate("abc")}
    expected = {name: alone(pair, prompt, sampling) for name, prompt in prompts.items()}
    preemptions = pair.decode.engine.stats.preemptions
    for name, prompt in prompts.items():
        pair.reserve(name, prompt, sampling, local=name == "a")
        pair.decode.round()
        if name != "a":
            pair.start(name, prompt, sampling)
            pair.claim(name)
    pair.pump_until_idle()
    ends = {over.reservation_id: over for over in pair.take_decode(Over)}
    assert pair.decode.engine.stats.preemptions > preemptions
    assert {name: pair.tokens(name) for name in prompts} == expected
    assert {name: (over.completion_tokens, over.prompt_tokens_computed) for name, over in ends.items()} == {
        "a": (150, 40),
        "b": (150, 0),
        "c": (150, 0),
    }
    assert pair.decode.engine.stats.prefix_queried_tokens == 6 * 40


def test_who_makes_room_behind_a_step_that_is_told_of_is_to_be_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, decode_blocks=14, watermark=1.0, overlapped=True)
    step, outputs = pair.decode.engine.step, list[StepOutput]()

    def watched_step(*, tick: Callable[[], None]) -> StepOutput:
        outputs.append(step(tick))
        return outputs[-1]

    monkeypatch.setattr(pair.decode.engine, "step", watched_step)
    sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    for name in "ab":
        pair.reserve(name, PROMPT[:40], sampling, local=True)
    for _ in range(200):
        pair.pump()
        if outputs[-1].preempted:
            break
    assert outputs[-1].preempted == ("b",)
    assert "b" in {done.request_id for done in outputs[-1].progress}
    assert {state: count for state, count in pair.reservations.items() if count} == {"local": 1, "running": 1}
    pair.pump_until_idle()


def test_a_request_with_a_writer_is_never_preempted(tmp_path: Path) -> None:
    pair = Pair(tmp_path, decode_blocks=8, watermark=1.0)
    long = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    pair.reserve("a", PROMPT[:16], long, local=True)
    pair.decode.round()
    hand_over(pair, "b", PROMPT[20:60])
    pair.hub.hold = True
    for _ in range(200):
        pair.pump()
    reservations = pair.decode._reservations
    assert reservations.get(ReservationId("b")).state is State.FILLING
    assert 16 + len(pair.tokens("a")) - 1 == 5 * BLOCK_TOKENS  # it has all that is left, and waits
    assert not pair.decode.engine.has_work
    pair.hub.hold = False
    pair.pump_until_idle()
    assert {over.reservation_id: over.completion_tokens for over in pair.take_decode(Over)} == {"a": 80, "b": 8}


def test_the_lowest_priority_makes_room_on_a_decode_worker(tmp_path: Path) -> None:
    pair = Pair(tmp_path, decode_blocks=14, watermark=1.0)
    long = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    preempted: list[str] = []
    take_step = pair.decode.stepped

    def stepped(output: StepOutput) -> None:
        preempted.extend(output.preempted)
        take_step(output)

    pair.decode.stepped = stepped  # type: ignore[method-assign]
    for name, priority in (("low", -5), ("high", 5)):
        pair.reserve(name, PROMPT[: 30 + priority], long, local=True, priority=priority)
    pair.pump_until_idle()
    assert preempted[0] == "low"
    assert "high" not in preempted


def test_a_prompt_over_the_pool_is_refused_and_the_next_one_served(tmp_path: Path) -> None:
    """F07, on both tiers; on the decode worker also prompt + max_tokens."""
    pair = Pair(tmp_path, prefill_blocks=49, decode_blocks=49)
    long = [5] * 1002
    pair.start("p", long, GREEDY)
    pair.reserve("d", long, GREEDY)
    pair.reserve("e", PROMPT, SamplingParams(max_tokens=1000))
    pair.pump()
    assert [each.failure.reason for each in pair.take_prefill(PrefillFailed)] == ["EXCEEDS_POOL"]
    for over in pair.take_decode(Over):
        assert over.failure.reason == "EXCEEDS_POOL"
        assert "the pool has 49" in over.failure.message
    assert len(serve(pair, "next", PROMPT[:5])) == 8


def test_penalties_see_the_whole_prompt_cold_cached_and_handed_over(pair: Pair) -> None:
    """F18, as far as the cache goes: repetition counts the prompt's tokens, wherever their KV comes from."""
    prompt = [7, 8, 9] * 20
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=1.8)
    cold = serve(pair, "a", prompt, sampling)
    hit = serve(pair, "b", prompt, sampling)
    pair.reserve("c", prompt, sampling, local=True)
    pair.pump_until_idle()
    assert cold == hit == pair.tokens("c") == alone(pair, prompt, sampling)
    assert pair.first_tokens()[-1].cached_tokens == 48


def test_prefix_statistics_count_each_request_once_whatever_befalls_it(tmp_path: Path) -> None:
    """F59: refusals, a second attempt and preemptions change nothing."""
    pair = Pair(tmp_path, prefill_blocks=8, decode_blocks=8)
    hand_over(pair, "a", PROMPT)
    pair.hub.hold = True
    for number in range(10):
        pair.reserve(f"refused-{number}", PROMPT[::-1], GREEDY)
        pair.start(f"refused-{number}", PROMPT[::-1], GREEDY)
        pair.pump()
    assert {over.failure.reason for over in pair.take_decode(Over)} == {"OVERLOADED"}
    pair.hub.hold = False
    pair.pump_until_idle()
    stats = [loop.engine.stats for loop in (pair.prefill, pair.decode)]
    assert [(each.prefix_queried_tokens, each.prefix_hit_tokens) for each in stats] == [(100, 0), (100, 0)]
    serve(pair, "b", PROMPT)
    assert [(each.prefix_queried_tokens, each.prefix_hit_tokens) for each in stats] == [(200, 96), (200, 96)]


def _hashes(tokens: list[int], blocks: int) -> list[bytes]:
    return block_hashes(tokens, stop=blocks)


def test_prompts_that_come_together_are_computed_once_where_they_are_alike(pair: Pair) -> None:
    """Those that wait for their turn find what those before them have left."""
    prompts = {name: [*PROMPT[:94], ord(name), 7] for name in "abcd"}  # of three steps' budgets
    for name, prompt in prompts.items():
        hand_over(pair, name, prompt)
    pair.pump_until_idle()
    cached = {first.attempt.reservation_id: first.cached_tokens for first in pair.first_tokens()}
    assert cached == {"a": 0, "b": 80, "c": 80, "d": 80}
    assert pair.prefill.engine.stats.prompt_tokens_computed == 96 + 3 * 16
    for name, prompt in prompts.items():
        assert pair.tokens(name) == alone(pair, prompt)


def test_prompts_that_come_together_to_a_decode_worker_are_computed_once_where_they_are_alike(pair: Pair) -> None:
    for name in "ab":
        pair.reserve(name, [*PROMPT[:95], ord(name)], GREEDY, local=True)
    pair.pump_until_idle()
    ends = {over.reservation_id: over for over in pair.take_decode(Over)}
    assert [(ends[name].prompt_tokens_computed, ends[name].cached_tokens) for name in "ab"] == [(96, 0), (16, 80)]
    answers = {name: pair.tokens(name) for name in "ab"}
    assert answers == {name: alone(pair, [*PROMPT[:95], ord(name)]) for name in "ab"}


def test_a_prompt_after_a_flood_of_others_is_computed_as_when_it_was_new(tmp_path: Path) -> None:
    """F20: its blocks were evicted, and hold something else by now."""
    pair = Pair(tmp_path, prefill_blocks=16, decode_blocks=16)
    cold = serve(pair, "cold", PROMPT, DRAWN)
    assert serve(pair, "warm", PROMPT, DRAWN) == cold
    for number in range(12):
        serve(pair, f"flood-{number}", [number, *PROMPT[1:]])
    assert serve(pair, "again", PROMPT, DRAWN) == cold
    cached = {first.attempt.reservation_id: first.cached_tokens for first in pair.first_tokens()}
    assert (cached["cold"], cached["warm"], cached["again"]) == (0, 96, 0)
    held = {over.reservation_id: over.cached_tokens for over in pair.take_decode(Over)}
    assert (held["cold"], held["warm"], held["again"]) == (0, 96, 0)
