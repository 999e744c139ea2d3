"""Several choices of one prompt, and log-probabilities, from a prefill engine through a decode engine, both real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paceline.services.decode.messages import ChoiceOver, EndChoice, NewTokens
from paceline.testing.pair import Pair
from paceline.types import FinishReason, ReservationId, SamplingParams, TokenLogprob

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, temperature=1.5, seed=9, ignore_eos=True)
PROMPT = [7 * i % 500 + 3 for i in range(100)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def hand_over(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    pair.reserve(name, prompt, sampling)
    pair.decode.round()
    pair.start(name, prompt, sampling)
    pair.claim(name)


def serve(pair: Pair, prompt: list[int], sampling: SamplingParams, *, local: bool) -> dict[int, list[NewTokens]]:
    """What the decode engine tells of each choice, the prompt computed there or handed over."""
    if local:
        pair.reserve("r", prompt, sampling, local=True)
    else:
        hand_over(pair, "r", prompt, sampling)
    pair.pump_until_idle()
    told: dict[int, list[NewTokens]] = {}
    for event in pair.take_decode(NewTokens):
        told.setdefault(event.choice, []).append(event)
    return told


def ids(told: list[NewTokens]) -> list[int]:
    assert [event.index for event in told] == list(range(len(told)))
    return [token for event in told for token in event.ids]


def logprobs(told: list[NewTokens]) -> list[TokenLogprob]:
    return [logprob for event in told for logprob in event.logprobs]


def about(found: list[TokenLogprob]) -> Any:
    return pytest.approx([each.logprob for each in found], abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_log_probabilities_come_through_the_hand_off_from_the_first_token_on(
    pair: Pair, sampling: SamplingParams
) -> None:
    """F10: eight entries, and entry 0, made by the prefill engine, equals a single process's."""
    asking = msgspec.structs.replace(sampling, logprobs=5)
    handed = serve(pair, PROMPT, asking, local=False)[0]
    [first] = pair.first_tokens()
    single = serve(pair, PROMPT, asking, local=True)[0]
    assert len(logprobs(handed)) == 8
    assert [each.token_id for each in logprobs(handed)] == ids(handed) == ids(single)
    assert [each.logprob for each in logprobs(handed)] == about(logprobs(single))
    assert [[token for token, _ in each.top] for each in logprobs(handed)] == [
        [token for token, _ in each.top] for each in logprobs(single)
    ]
    assert first.logprobs == tuple(logprobs(handed)[:1])
    assert all(len(each.top) == 5 for each in logprobs(handed))


def test_what_is_not_asked_for_is_not_reported(pair: Pair) -> None:
    assert logprobs(serve(pair, PROMPT, GREEDY, local=False)[0]) == []
    bare = serve(pair, PROMPT, msgspec.structs.replace(GREEDY, logprobs=0), local=False)[0]
    assert [each.top for each in logprobs(bare)] == [()] * 8


@pytest.mark.parametrize("num_prompt", [5, 16, 40, 100])
@pytest.mark.parametrize("local", [True, False])
def test_every_choice_is_the_answer_that_it_is_alone(pair: Pair, num_prompt: int, local: bool) -> None:
    """One prefill, one transfer; a choice draws by its own number, whoever computes it."""
    prompt = PROMPT[:num_prompt]
    told = serve(pair, prompt, msgspec.structs.replace(DRAWN, n=4), local=local)
    over = pair.over("r")
    answers = {choice: ids(events) for choice, events in told.items()}
    assert sorted(answers) == [0, 1, 2, 3]
    assert answers[0] == ids(serve(pair, prompt, DRAWN, local=True)[0])
    assert len({tuple(answer) for answer in answers.values()}) == 4
    assert over.completion_tokens == 32
    assert over.prompt_tokens_computed == (num_prompt if local else 0)
    if not local:
        assert over.blocks_landed == -(-num_prompt // 16)
        assert len(pair.first_tokens()[0].tokens) == 4


def test_choices_are_the_same_handed_over_and_alone_and_share_the_prompts_blocks(pair: Pair) -> None:
    sampling = msgspec.structs.replace(DRAWN, n=3, max_tokens=30)
    handed = serve(pair, PROMPT, sampling, local=False)
    pair.over("r")
    pair.reserve("r", PROMPT, sampling, local=True)
    most_used = 0
    for _ in range(500):
        pair.pump()
        most_used = max(most_used, pair.decode.engine.pool.used)
        if pair.idle:
            break
    local: dict[int, list[NewTokens]] = {}
    for event in pair.take_decode(NewTokens):
        local.setdefault(event.choice, []).append(event)
    assert {choice: ids(events) for choice, events in local.items()} == {
        choice: ids(events) for choice, events in handed.items()
    }
    assert most_used <= 6 + 3 * 3  # 96 tokens are shared; 4 and 29 more are each choice's own


def test_a_choice_that_ends_leaves_the_others_to_go_on(pair: Pair) -> None:
    plain = {c: ids(each) for c, each in serve(pair, PROMPT, msgspec.structs.replace(DRAWN, n=3), local=True).items()}
    pair.over("r")
    pair.take_decode(ChoiceOver)
    stop = plain[1][0]  # choice 1 ends with its first token
    sampling = msgspec.structs.replace(DRAWN, n=3, stop_token_ids=(stop,))
    for local in (True, False):
        told = {choice: ids(events) for choice, events in serve(pair, PROMPT, sampling, local=local).items()}
        ends = {event.choice: event for event in pair.take_decode(ChoiceOver)}
        pair.over("r")
        assert told[1] == [stop]
        assert (ends[1].finish, ends[1].completion_tokens) == (FinishReason.STOP, 1)
        for choice in (0, 2):
            if stop not in plain[choice]:
                assert told[choice] == plain[choice]
                assert ends[choice].finish is FinishReason.LENGTH


def test_choices_that_all_end_with_their_first_tokens_never_land(pair: Pair) -> None:
    hand_over(pair, "r", PROMPT, msgspec.structs.replace(DRAWN, n=3, max_tokens=1))
    pair.pump(20)
    [first] = pair.first_tokens()
    assert first.finish is FinishReason.LENGTH
    assert first.finishes == (FinishReason.LENGTH,) * 3
    pair.cancel("r")
    pair.pump_until_idle()
    assert pair.over("r").completion_tokens == 0


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("rounds", [0, 1, 3, 5, 7, 9])
def test_a_cancelled_request_gives_all_blocks_of_all_choices_back(pair: Pair, rounds: int, local: bool) -> None:
    sampling = msgspec.structs.replace(DRAWN, n=4)
    if local:
        pair.reserve("r", PROMPT, sampling, local=True)
    else:
        hand_over(pair, "r", PROMPT, sampling)
        pair.abort_prefill("nobody")
    pair.pump(rounds)
    pair.cancel("r")
    pair.abort_prefill("r")
    pair.pump_until_idle()


@pytest.mark.parametrize("rounds", [0, 2, 6, 8])
def test_one_choice_can_be_ended_and_the_others_stay_as_they_are(pair: Pair, rounds: int) -> None:
    sampling = msgspec.structs.replace(DRAWN, n=3)
    plain = {choice: ids(events) for choice, events in serve(pair, PROMPT, sampling, local=True).items()}
    pair.over("r")
    pair.take_decode(ChoiceOver)
    pair.reserve("r", PROMPT, sampling, local=True)
    pair.pump(rounds)
    pair.tell_decode(EndChoice(reservation_id=ReservationId("r"), choice=0))
    pair.pump_until_idle()
    told: dict[int, list[int]] = {}
    for event in pair.take_decode(NewTokens):
        told.setdefault(event.choice, []).extend(event.ids)
    assert {choice: told[choice] for choice in (1, 2)} == {choice: plain[choice] for choice in (1, 2)}
    assert told.get(0, []) == plain[0][: len(told.get(0, []))]
    ends = {event.choice: event.finish for event in pair.take_decode(ChoiceOver)}
    first = FinishReason.CANCELLED if rounds < 8 else FinishReason.LENGTH  # it had ended by itself
    assert ends == {0: first, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert pair.over("r").completion_tokens == sum(map(len, told.values()))


def test_choices_that_find_no_block_are_computed_again_and_stay_as_they_are(tmp_path: Path) -> None:
    sampling = msgspec.structs.replace(DRAWN, n=4, max_tokens=30)
    wide = {c: ids(each) for c, each in serve(Pair(tmp_path), PROMPT, sampling, local=True).items()}
    pair = Pair(tmp_path, decode_blocks=9)
    narrow = serve(pair, PROMPT, sampling, local=True)
    assert {choice: ids(events) for choice, events in narrow.items()} == wide


@pytest.mark.parametrize("local", [True, False])
def test_a_prompts_log_probabilities_come_once_and_are_those_of_its_own_tokens(pair: Pair, local: bool) -> None:
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2, logprobs=0)
    told = serve(pair, PROMPT, sampling, local=local)[0]
    found = told[0].prompt_logprobs if local else pair.first_tokens()[0].prompt_logprobs
    assert [each.token_id for each in found] == PROMPT[1:]
    assert sum(len(event.prompt_logprobs) for event in told) == (len(found) if local else 0)
    for length in (1, 16, 17, 50):  # a prompt cut there has the rest's first token as an answer's
        only = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
        [cut] = logprobs(serve(pair, PROMPT[:length], only, local=True)[0])
        score = found[length - 1]
        assert [token for token, _ in cut.top[:2]] == [token for token, _ in score.top]
        assert [value for _, value in score.top] == pytest.approx([value for _, value in cut.top[:2]], abs=1e-4)


@pytest.mark.parametrize("rounds", [2, 4, 8])
def test_unusable_logits_end_all_choices_and_every_block_comes_back(pair: Pair, rounds: int) -> None:
    pair.reserve("r", PROMPT, msgspec.structs.replace(DRAWN, n=3), local=True)
    pair.pump(rounds)
    pair.decode.engine.runner.pool.fill_(torch.nan)
    pair.pump_until_idle()
    over = pair.over("r")
    assert over.failure is not None
    assert over.failure.reason == "NUMERICAL_ERROR"
