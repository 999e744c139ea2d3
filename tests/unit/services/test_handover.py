"""A prompt's way from a prefill engine into a decode engine, both real, over the loopback transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.engine.request import StepOutput
from paceline.errors import EngineUnsound
from paceline.kvtransfer.transports.transport import Handle, Peer, Piece
from paceline.services.decode.messages import CallRefused, Over, Redirected, Reserved, WriteGranted
from paceline.services.prefill.messages import PrefillFailed, Stopped
from paceline.services.worker.loop import MOST_SPOILT
from paceline.testing.pair import Pair
from paceline.types import FinishReason, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [7 * i % 500 + 3 for i in range(100)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def alone(pair: Pair, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The answer of a decode worker that computes the whole prompt itself."""
    pair.reserve("alone", prompt, sampling, local=True, salt="alone")
    pair.pump_until_idle()
    assert pair.over("alone").prompt_tokens_computed == len(prompt)
    return pair.tokens("alone")


@pytest.fixture
def overlapped(tmp_path: Path) -> Pair:
    """Steps are launched ahead and writes follow them, as between two GPUs."""
    return Pair(tmp_path, overlapped=True)


def test_an_engine_that_spoils_every_prompt_tells_of_them_and_ends(pair: Pair) -> None:
    pair.prefill.engine.runner.model.weights.final_norm.fill_(torch.nan)  # type: ignore[attr-defined]
    with pytest.raises(EngineUnsound, match=f"the last {MOST_SPOILT} requests all began with NaN or infinite logits"):
        for number in range(MOST_SPOILT + 1):
            pair.start(f"r{number}", PROMPT[:20], GREEDY)
            pair.pump(3)
    assert [event.failure.reason for event in pair.take_prefill(PrefillFailed)] == ["NUMERICAL_ERROR"] * MOST_SPOILT


@pytest.mark.parametrize("launched_ahead", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33, 100])
def test_a_handed_over_prompt_gives_the_tokens_of_a_single_process(
    tmp_path: Path, num_prompt: int, launched_ahead: bool
) -> None:
    pair = Pair(tmp_path, overlapped=launched_ahead)
    prompt = PROMPT[:num_prompt]
    pair.hand_over("r", prompt, GREEDY)
    pair.pump_until_idle()
    over = pair.over("r")
    [first] = pair.first_tokens()
    answer = pair.tokens("r")
    assert answer == alone(pair, prompt, GREEDY)
    assert answer[:1] == first.tokens
    assert over.finish is FinishReason.LENGTH
    assert over.completion_tokens == 8
    assert over.prompt_tokens_computed == 0
    assert over.blocks_landed == -(-num_prompt // 16)


def test_a_seeded_answer_does_not_depend_on_where_the_prompt_was_computed(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, seed=42, ignore_eos=True)
    pair.hand_over("r", PROMPT, sampling)
    pair.pump_until_idle()
    assert pair.tokens("r") == alone(pair, PROMPT, sampling)


def test_an_engine_gives_a_sign_of_life_in_the_middle_of_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step may take longer than a front waits for one."""
    step, before, after = pair.prefill.engine.step, [], []

    def watched_step(*, tick: Callable[[], None]) -> StepOutput:
        pair.ping_prefill()
        before.append(pair.prefill_alive)
        output = step(tick)
        after.append(pair.prefill_alive)
        return output

    monkeypatch.setattr(pair.prefill.engine, "step", watched_step)
    pair.hand_over("r", PROMPT, GREEDY)
    pair.prefill.round()
    assert (before, after) == ([0], [1])


def test_a_call_is_answered_before_the_step_that_follows_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.abort_prefill("nobody knows it")
    step, answered = pair.prefill.engine.step, []

    def watched_step(*, tick: Callable[[], None]) -> StepOutput:
        answered.extend(pair.take_prefill(Stopped))
        return step(tick)

    monkeypatch.setattr(pair.prefill.engine, "step", watched_step)
    pair.prefill.round()
    assert [stopped.found for stopped in answered] == [False]


def test_a_grant_that_comes_during_a_step_is_taken_in_before_its_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.reserve("r", PROMPT, GREEDY)
    pair.decode.round()
    pair.start("r", PROMPT, GREEDY)
    step, opened = pair.prefill.engine.step, []

    def step_with_a_grant(*, tick: Callable[[], None]) -> StepOutput:
        def tick_after_the_grant() -> None:
            tick()
            opened.append(pair.prefill.next_deadline() is not None)  # a sign of life is due: the way is open

        if not opened:
            pair.claim("r")
            pair.reserve("second", PROMPT, GREEDY)
            pair.start("second", PROMPT, GREEDY)  # must wait: the engine is in the middle of a step
        return step(tick_after_the_grant)

    monkeypatch.setattr(pair.prefill.engine, "step", step_with_a_grant)
    pair.prefill.round()
    assert opened[0]
    assert pair.prefill.load.waiting + pair.prefill.load.running == 1
    pair.prefill.round()
    assert pair.prefill.load.waiting + pair.prefill.load.running == 2
    pair.claim("second")
    pair.pump_until_idle()
    assert [over.blocks_landed for over in pair.take_decode(Over)] == [7, 7]


def test_parts_arrive_while_later_chunks_are_to_be_computed(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.pump_until_idle()
    [first] = pair.first_tokens()
    assert first.parts_before_last_chunk == 3  # 100 tokens in chunks of 32
    assert pair.over("r").parts_landed == 4


def test_blocks_are_on_their_way_before_the_step_that_fills_them_has_ended(overlapped: Pair) -> None:
    posts = watch_posts(overlapped)
    overlapped.hand_over("r", PROMPT[:20], GREEDY)
    overlapped.prefill.round()  # launches the only chunk
    assert posts == [(2, True)]
    overlapped.pump_until_idle()
    assert posts == [(2, True), (0, False)]  # the last part brings the first token alone
    [first] = overlapped.first_tokens()
    assert first.parts == 1
    assert overlapped.over("r").blocks_landed == 2


def test_a_grant_does_not_put_finished_blocks_behind_the_steps_of_others(overlapped: Pair) -> None:
    overlapped.reserve("late", PROMPT[:20], GREEDY)
    overlapped.decode.round()
    overlapped.start("late", PROMPT[:20], GREEDY)
    overlapped.prefill.round()
    overlapped.start("other", PROMPT[40:], GREEDY)
    overlapped.prefill.round()  # launches the other's first chunk behind it
    posts = watch_posts(overlapped)
    overlapped.claim("late")
    overlapped.prefill.round()
    assert posts[0] == (2, False)


def test_a_grant_does_not_put_finished_blocks_behind_the_step_that_fills_the_others(overlapped: Pair) -> None:
    overlapped.reserve("late", PROMPT[:60], GREEDY)
    overlapped.decode.round()
    overlapped.start("late", PROMPT[:60], GREEDY)
    for _ in range(2):
        overlapped.prefill.round()  # the first chunk has ended, and the second is in flight
    posts = watch_posts(overlapped)
    overlapped.claim("late")
    overlapped.prefill.round()
    assert posts[:2] == [(2, False), (2, True)]
    overlapped.pump_until_idle()
    [first] = overlapped.first_tokens()
    assert first.parts == overlapped.over("late").parts_landed == 2
    assert overlapped.tokens("late") == alone(overlapped, PROMPT[:60], GREEDY)


def test_a_launch_that_posts_nothing_is_no_sign_of_life(overlapped: Pair) -> None:
    overlapped.hub.in_stream = False
    overlapped.hand_over("r", PROMPT, GREEDY)
    overlapped.prefill.round()
    [handoff] = overlapped.prefill._handoffs.values()
    due = handoff.keep_alive_at
    assert due is not None
    handoff.launched(64, due)
    assert handoff.keep_alive_at == due


def test_an_abort_while_writes_follow_a_step_keeps_the_blocks_until_they_have_ended(overlapped: Pair) -> None:
    overlapped.hub.hold = True
    overlapped.hand_over("r", PROMPT[:20], GREEDY)
    overlapped.prefill.round()
    overlapped.abort_prefill("r")
    for _ in range(3):
        overlapped.prefill.round()
    assert overlapped.take_prefill(Stopped) == []
    assert overlapped.prefill.load.free_blocks == overlapped.prefill.load.total_blocks - 2
    overlapped.hub.hold = False
    for _ in range(3):
        overlapped.prefill.round()
    assert [stopped.found for stopped in overlapped.take_prefill(Stopped)] == [True]
    assert overlapped.prefill.load.free_blocks == overlapped.prefill.load.total_blocks


def watch_posts(pair: Pair) -> list[tuple[int, bool]]:
    """Blocks of each post to come, and whether it waits for what was launched."""
    transport = pair.prefill.agent._transport
    post, seen = transport.post, []

    def watched(peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False) -> Handle:
        seen.append((sum(piece.num_blocks for piece in pieces), in_stream))
        return post(peer, pieces, notification, in_stream=in_stream)

    transport.post = watched  # type: ignore[method-assign]
    return seen


def test_the_claim_may_come_after_the_whole_prompt_is_computed(pair: Pair) -> None:
    pair.reserve("r", PROMPT, GREEDY)
    pair.start("r", PROMPT, GREEDY)
    pair.pump(20)
    assert len(pair.first_tokens()) == 1
    pair.claim("r")
    pair.pump_until_idle()
    assert pair.tokens("r") == alone(pair, PROMPT, GREEDY)


def test_nothing_is_written_before_the_claim_is_granted(pair: Pair) -> None:
    before = pair.decode.engine.runner.pool.clone()
    pair.reserve("r", PROMPT, GREEDY)
    pair.start("r", PROMPT, GREEDY)
    pair.pump(20)
    assert len(pair.first_tokens()) == 1
    assert torch.equal(before, pair.decode.engine.runner.pool)


def test_a_request_that_its_first_token_ends_never_lands(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    pair.hand_over("r", PROMPT, sampling)
    pair.pump(20)
    [first] = pair.first_tokens()
    assert first.finish is FinishReason.LENGTH
    assert pair.tokens("r") == []
    pair.cancel("r")
    pair.pump_until_idle()
    assert pair.over("r").completion_tokens == 0


@pytest.mark.parametrize("launched_ahead", [False, True])
@pytest.mark.parametrize("rounds", range(12))
def test_a_cancel_after_any_number_of_rounds_brings_every_block_back(
    tmp_path: Path, rounds: int, launched_ahead: bool
) -> None:
    pair = Pair(tmp_path, overlapped=launched_ahead)
    pair.hand_over("r", PROMPT, GREEDY)
    pair.pump(rounds)
    pair.cancel("r")
    pair.abort_prefill("r")
    pair.pump_until_idle()
    assert pair.over("r").finish in (FinishReason.CANCELLED, FinishReason.LENGTH)


@pytest.mark.parametrize("rounds", range(8))
def test_a_prompt_re_targeted_while_writes_follow_its_steps_is_answered_as_ever(overlapped: Pair, rounds: int) -> None:
    """Whatever of the first attempt is still under way lands in blocks that nobody else has."""
    expected = alone(overlapped, PROMPT, GREEDY)
    overlapped.hub.delay_polls = 2
    overlapped.hand_over("r", PROMPT, GREEDY)
    overlapped.pump(rounds)
    overlapped.retarget("r", local=True)
    overlapped.pump_until_idle()
    assert overlapped.tokens("r") == expected


def test_an_abort_is_answered_only_when_no_write_is_under_way(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.hub.hold = True
    pair.pump(2)
    pair.abort_prefill("r")
    pair.pump(50)
    assert pair.take_prefill(Stopped) == []
    assert pair.prefill.load.free_blocks < pair.prefill.load.total_blocks
    pair.hub.hold = False
    pair.prefill.round()
    pair.prefill.round()
    [stopped] = pair.take_prefill(Stopped)
    assert stopped.found
    assert pair.prefill.load.free_blocks == pair.prefill.load.total_blocks


def test_blocks_of_a_cancelled_request_stay_in_quarantine_until_the_writer_has_stopped(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.hub.hold = True
    pair.pump(2)
    pair.cancel("r")
    pair.pump(50)
    load = pair.decode.load
    assert load.quarantined_blocks == 7
    assert load.free_blocks == load.total_blocks - 7
    pair.hub.hold = False
    pair.pump_until_idle()


def test_a_late_write_never_touches_the_blocks_of_a_later_request(pair: Pair) -> None:
    """F29: the write of an aborted request is delayed, while another request wants the blocks."""
    expected = alone(pair, PROMPT[:50], GREEDY)
    pair.hand_over("a", PROMPT, GREEDY)
    pair.hub.hold = True
    pair.pump(2)
    pair.cancel("a")
    pair.reserve("b", PROMPT[:50], GREEDY, local=True)
    pair.pump(4)
    pair.hub.hold = False
    pair.pump_until_idle()
    assert pair.tokens("b") == expected


def test_a_failed_write_is_told_and_a_second_attempt_lands(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.hub.fail_next = 1
    pair.pump(3)
    [failed] = pair.take_prefill(PrefillFailed)
    assert failed.failure.reason == "TRANSFER_FAILED"
    assert failed.target == pair.decode_key
    pair.retarget("r")
    pair.decode.round()
    [redirected] = pair.take_decode(Redirected)
    assert redirected.attempt == 2
    pair.start("r", PROMPT, GREEDY, attempt=2)
    pair.claim("r", attempt=2)
    pair.pump_until_idle()
    assert pair.tokens("r") == alone(pair, PROMPT, GREEDY)


def test_a_request_retargeted_to_the_decode_worker_is_computed_there(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.pump(2)
    pair.retarget("r", local=True)
    pair.pump_until_idle()
    over = pair.over("r")
    assert over.prompt_tokens_computed == len(PROMPT)
    assert pair.tokens("r") == alone(pair, PROMPT, GREEDY)


def test_both_sides_refuse_when_full_and_serve_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, prefill_blocks=8, decode_blocks=8)
    pair.hand_over("a", PROMPT, GREEDY)
    pair.reserve("b", PROMPT, GREEDY)
    pair.start("b", PROMPT, GREEDY)
    pair.pump()
    assert pair.over("b").failure.reason == "OVERLOADED"
    assert [event.failure.reason for event in pair.take_prefill(PrefillFailed)] == ["OVERLOADED"]
    pair.pump_until_idle()
    assert len(pair.tokens("a")) == 8


def test_a_prompt_over_the_pool_is_refused_before_a_block_is_taken(tmp_path: Path) -> None:
    pair = Pair(tmp_path, prefill_blocks=8, decode_blocks=8)
    pair.reserve("r", PROMPT * 2, GREEDY)
    pair.start("r", PROMPT * 2, GREEDY)
    pair.pump()
    assert pair.over("r").failure.reason == "EXCEEDS_POOL"
    assert [event.failure.reason for event in pair.take_prefill(PrefillFailed)] == ["EXCEEDS_POOL"]
    assert pair.idle


def test_a_claim_for_another_attempt_or_an_unknown_reservation_is_refused(pair: Pair) -> None:
    pair.reserve("r", PROMPT, GREEDY)
    pair.decode.round()
    with pytest.raises(ValueError, match="not enough values"):
        pair.claim("r", attempt=2)
    with pytest.raises(ValueError, match="not enough values"):
        pair.claim("unknown")
    assert [event.failure.reason for event in pair.take_decode(CallRefused)] == ["WRONG_ATTEMPT", "UNKNOWN_RESERVATION"]
    assert pair.take_decode(WriteGranted) == []
    assert len(pair.take_decode(Reserved)) == 1


def test_a_decode_worker_that_may_not_prefill_refuses_a_local_prompt(tmp_path: Path) -> None:
    pair = Pair(tmp_path, local_prefill="never")
    pair.reserve("r", PROMPT, GREEDY, local=True)
    pair.reserve("s", PROMPT, GREEDY)
    pair.decode.round()
    pair.retarget("s", local=True)
    pair.decode.round()
    ends = pair.take_decode(Over)
    assert [(over.reservation_id, over.failure.reason) for over in ends] == [("r", "NO_WORKER"), ("s", "NO_WORKER")]
    assert pair.decode.load.committed_blocks == 0


def test_many_requests_share_small_pools_and_each_ends_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path, prefill_blocks=24, decode_blocks=24)
    waiting = {f"r{i}": PROMPT[: 5 + 3 * i] for i in range(20)}
    expected = {name: len(prompt) for name, prompt in waiting.items()}
    answers: dict[str, list[int]] = {}
    for _ in range(3000):
        for name, prompt in list(waiting.items()):
            needed = -(-(len(prompt) + 7) // 16)
            if min(pair.prefill.load.headroom_blocks, pair.decode.load.headroom_blocks) >= needed:
                pair.hand_over(name, prompt, GREEDY)
                del waiting[name]
        pair.pump()
        if not waiting and pair.idle:
            break
    answers = {name: pair.tokens(name) for name in expected}
    assert all(len(answer) == 8 for answer in answers.values())
    assert pair.idle


def test_a_grant_for_another_prompt_fails_the_hand_off_and_the_engine_lives_on(pair: Pair) -> None:
    pair.reserve("r", PROMPT[:16], GREEDY)
    pair.decode.round()
    pair.start("r", PROMPT, GREEDY)
    pair.claim("r")
    pair.pump(8)
    [failed] = pair.take_prefill(PrefillFailed)
    assert failed.failure.reason == "TRANSFER_FAILED"
    assert failed.target == pair.decode_key
    pair.cancel("r")
    pair.pump_until_idle()
    pair.take_decode(Over)
    pair.hand_over("s", PROMPT, GREEDY)
    pair.pump_until_idle()
    assert len(pair.tokens("s")) == 8


def test_a_prompt_of_which_only_a_part_landed_is_never_run(pair: Pair) -> None:
    pair.reserve("r", PROMPT, GREEDY)
    pair.decode.round()
    pair.start("r", PROMPT[:16], GREEDY)
    pair.claim("r", most=1)
    pair.pump_until_idle()
    over = pair.over("r")
    assert over.failure is not None
    assert over.failure.reason == "TRANSFER_FAILED"
    assert "1 blocks landed for a prompt of 100 tokens" in over.failure.message
    assert pair.tokens("r") == []


def test_blocks_of_a_given_up_attempt_are_not_counted_among_those_that_landed(pair: Pair) -> None:
    pair.hand_over("r", PROMPT, GREEDY)
    pair.pump(3)
    pair.retarget("r")
    pair.decode.round()
    pair.start("r", PROMPT, GREEDY, attempt=2)
    pair.claim("r", attempt=2)
    pair.pump_until_idle()
    assert pair.over("r").blocks_landed == 7


def test_a_computed_prompt_that_nobody_claims_is_let_go(pair: Pair) -> None:
    pair.start("r", PROMPT, GREEDY)
    pair.pump(20)
    assert len(pair.first_tokens()) == 1
    due = pair.prefill.next_deadline()
    assert due is not None
    pair.prefill.expire(due - 0.1)
    assert not pair.idle
    pair.prefill.expire(due)
    assert pair.idle


def test_attempts_given_up_on_purpose_are_no_failed_writes(pair: Pair) -> None:
    pair.hand_over("a", PROMPT, SamplingParams(max_tokens=1, temperature=0.0))
    pair.pump(20)
    pair.cancel("a")
    pair.hand_over("b", PROMPT, GREEDY)
    pair.pump(2)
    pair.cancel("b")
    pair.abort_prefill("b")
    pair.pump_until_idle()
    assert pair.prefill_activity("failed_writes") == 0
    pair.hand_over("c", PROMPT, GREEDY)
    pair.hub.fail_next = 1
    pair.pump(3)
    pair.cancel("c")
    pair.pump_until_idle()
    assert pair.prefill_activity("failed_writes") == 1
