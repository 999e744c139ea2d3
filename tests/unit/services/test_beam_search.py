"""Beam search from a prefill engine through a decode engine, both real, against transformers' own on random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.services.decode.messages import ChoiceOver, EndChoice, NewTokens, Over
from paceline.testing.pair import Pair
from paceline.testing.random_models import SHAPES, VOCAB_SIZE, make, save
from paceline.types import FinishReason, ReservationId, SamplingParams, TokenLogprob

STOPS = tuple(range(7, VOCAB_SIZE, 11))
"""So many tokens end an answer that beams finish at different lengths."""
LENGTHS = (5, 16, 40, 100)


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def beams(width: int, **more: Any) -> SamplingParams:
    asked: dict[str, Any] = {"max_tokens": 12, "n": width, "logprobs": 0, "stop_token_ids": STOPS, **more}
    return SamplingParams(beam_width=width, temperature=0.0, **asked)


@dataclass(frozen=True)
class Answer:
    """One of the best: its tokens, and its score as transformers has it."""

    token_ids: list[int]
    score: float


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama", SHAPES[1])


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beams")
    save(model, made / "model")
    return made


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    made = of(folder)
    yield made
    assert made.idle, "every block comes back"


def of(folder: Path, **settings: Any) -> Pair:
    return Pair(folder, model=str(folder / "model"), **settings)


@torch.inference_mode()
def expected(model: Any, tokens: list[int], sampling: SamplingParams) -> list[Answer]:
    """What transformers finds."""
    ids = torch.tensor([tokens])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        do_sample=False,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=VOCAB_SIZE - 1,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = []
    for sequence, score in zip(found.sequences[:, len(tokens) :].tolist(), found.sequences_scores, strict=True):
        ends = [place for place, token in enumerate(sequence) if token in sampling.stop_token_ids]
        answers.append(Answer(sequence[: ends[0] + 1] if ends else sequence, float(score)))
    return answers


def start(pair: Pair, name: str, tokens: list[int], sampling: SamplingParams, *, local: bool) -> None:
    if local:
        pair.reserve(name, tokens, sampling, local=True)
    else:
        pair.hand_over(name, tokens, sampling)


def told(pair: Pair, sampling: SamplingParams, name: str = "r") -> list[list[TokenLogprob]]:
    """Each choice's tokens, all of them told at once."""
    events = [event for event in pair.take_decode(NewTokens) if event.reservation_id == name]
    assert [(event.choice, event.index) for event in events] == [(choice, 0) for choice in range(sampling.n)]
    for event in events:
        assert [each.token_id for each in event.logprobs] == event.ids
    return [list(event.logprobs) for event in events]


def serve(pair: Pair, tokens: list[int], sampling: SamplingParams, *, local: bool) -> list[Answer]:
    start(pair, "r", tokens, sampling, local=local)
    pair.pump_until_idle()
    return [scored(answer, sampling) for answer in told(pair, sampling)]


def scored(answer: list[TokenLogprob], sampling: SamplingParams) -> Answer:
    score = sum(each.logprob for each in answer) / len(answer) ** sampling.length_penalty
    return Answer([each.token_id for each in answer], score)


def assert_equal(found: list[Answer], wanted: list[Answer]) -> None:
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert [answer.score for answer in found] == pytest.approx([answer.score for answer in wanted], abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_sequences_and_scores_are_transformers(
    pair: Pair, model: Any, width: int, length_penalty: float, early_stopping: bool
) -> None:
    sampling = beams(width, length_penalty=length_penalty, early_stopping=early_stopping)
    lengths = set()
    for length in LENGTHS:
        wanted = expected(model, prompt(length), sampling)
        for local in (False, True):
            assert_equal(serve(pair, prompt(length), sampling, local=local), wanted)
        lengths |= {len(answer.token_ids) for answer in wanted}
    assert length_penalty > 0 or len(lengths) > 2, "beams that end together compare little"


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"n": 1},
        {"n": 3},
        {"min_tokens": 9, "length_penalty": 0.0},
        {"stop_token_ids": ()},
        {"stop_token_ids": (9,), "max_tokens": 40},
        {"stop_token_ids": tuple(range(0, VOCAB_SIZE - 20)), "length_penalty": -1.0},
    ],
    ids=str,
)
def test_whatever_ends_a_search_its_answers_are_transformers(pair: Pair, model: Any, more: dict[str, Any]) -> None:
    sampling = beams(4, **more)
    for length in LENGTHS:
        wanted = expected(model, prompt(length), sampling)
        for local in (False, True):
            assert_equal(serve(pair, prompt(length), sampling, local=local), wanted)


def test_one_beam_takes_the_likeliest_token_each_time(pair: Pair) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    pair.reserve("r", prompt(40), greedy, local=True)
    pair.pump_until_idle()
    plain = pair.tokens("r")
    [answer] = serve(pair, prompt(40), beams(1, stop_token_ids=()), local=False)
    assert answer.token_ids == plain


def test_one_prefill_and_one_transfer_serve_all_beams(pair: Pair) -> None:
    start(pair, "r", prompt(100), beams(8), local=False)
    pair.pump_until_idle()
    over = pair.over("r")
    assert (over.blocks_landed, over.prompt_tokens_computed, over.attempts) == (7, 0, 1)
    assert over.completion_tokens == sum(map(len, told(pair, beams(8))))
    [first] = pair.first_tokens()
    assert (len(first.tokens), first.finish) == (8 + len(STOPS), None)
    assert pair.prefill_activity("prompt_tokens") == 100


def test_ends_are_told_in_the_order_of_the_answers(pair: Pair) -> None:
    sampling = beams(4, max_tokens=5)
    start(pair, "r", prompt(40), sampling, local=False)
    pair.pump_until_idle()
    ends = pair.take_decode(ChoiceOver)
    answers = told(pair, sampling)
    assert [end.choice for end in ends] == [0, 1, 2, 3]
    assert [end.completion_tokens for end in ends] == [len(answer) for answer in answers]
    stopped = [answer[-1].token_id in STOPS for answer in answers]
    assert [end.finish is FinishReason.STOP for end in ends] == stopped
    assert len(set(stopped)) == 2


def test_each_token_is_reported_beside_the_likeliest_ones_at_its_place(pair: Pair) -> None:
    sampling = beams(2, logprobs=20, stop_token_ids=())
    start(pair, "r", prompt(40), sampling, local=False)
    pair.pump_until_idle()
    for answer in told(pair, sampling):
        for place, token in enumerate(answer):
            context = [*prompt(40), *(each.token_id for each in answer[:place])]
            pair.reserve("alone", context, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20), local=True)
            pair.pump_until_idle()
            [alone] = [logprob for event in pair.take_decode(NewTokens) for logprob in event.logprobs]
            assert [token_id for token_id, _ in token.top] == [token_id for token_id, _ in alone.top]
            assert [value for _, value in token.top] == pytest.approx([value for _, value in alone.top], abs=1e-4)


def test_a_searched_prompts_log_probabilities_come_with_the_best_answer(pair: Pair) -> None:
    sampling = beams(4, prompt_logprobs=1)
    start(pair, "r", prompt(40), sampling, local=True)
    pair.pump_until_idle()
    events = pair.take_decode(NewTokens)
    assert [each.token_id for each in events[0].prompt_logprobs] == prompt(40)[1:]
    assert [len(event.prompt_logprobs) for event in events[1:]] == [0, 0, 0]
    start(pair, "r", prompt(40), sampling, local=False)
    pair.pump_until_idle()
    [first] = pair.first_tokens()
    assert [each.token_id for each in first.prompt_logprobs] == prompt(40)[1:]
    assert not any(event.prompt_logprobs for event in pair.take_decode(NewTokens))


def test_beams_share_the_blocks_of_what_they_have_in_common(folder: Path) -> None:
    """Eight beams over 200 tokens hold 13 blocks together and a few of each one's own: alone one holds 14."""
    pair = of(folder, prefix_cache=False)
    sampling = beams(8, max_tokens=24, stop_token_ids=())
    start(pair, "r", prompt(200), sampling, local=False)
    most_used = 0
    while not pair.take_decode(ChoiceOver):
        pair.pump()
        most_used = max(most_used, pair.decode.engine.pool.used)
    assert 14 <= most_used <= 12 + 8 * 2
    assert pair.decode.engine.stats.preemptions == 0
    pair.pump_until_idle()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("decode_blocks", [5, 6, 8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_that_find_no_block_are_computed_again_and_the_answers_stay(
    folder: Path, model: Any, decode_blocks: int, local: bool, prefix_cache: bool
) -> None:
    """The pool holds one beam, and not two: each is computed in turn."""
    sampling = beams(4, max_tokens=33, stop_token_ids=(9,))
    pair = of(folder, decode_blocks=decode_blocks, prefix_cache=prefix_cache)
    assert_equal(serve(pair, prompt(40), sampling, local=local), expected(model, prompt(40), sampling))
    assert pair.decode.engine.stats.preemptions > 0


@pytest.mark.parametrize("decode_blocks", [9, 14, 24])
def test_searches_and_others_in_a_narrow_pool_all_end_with_their_own_answers(
    folder: Path, model: Any, decode_blocks: int
) -> None:
    pair = of(folder, decode_blocks=decode_blocks)
    asked = {
        f"r{number}": (prompt(20 + number), beams(width, max_tokens=20)) for number, width in enumerate((2, 8, 3, 4))
    }
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    waiting = [*asked.items(), *((f"s{number}", (prompt(30 + number), greedy)) for number in range(3))]
    running: set[str] = set()
    for _ in range(3_000):
        if waiting and len(running) < 3:
            name, (tokens, sampling) = waiting.pop(0)
            pair.reserve(name, tokens, sampling, local=True, priority=len(waiting) % 2)
            running.add(name)
        pair.pump()
        for over in pair.take_decode(Over):
            running.discard(over.reservation_id)
            if over.failure is not None:
                assert over.failure.reason == "OVERLOADED"
                name = str(over.reservation_id)
                waiting.append((name, asked.get(name, (prompt(30 + int(name[1:])), greedy))))
        if not waiting and not running:
            break
    assert not waiting and not running and pair.idle
    events = pair.take_decode(NewTokens)
    for name, (tokens, sampling) in asked.items():
        answers = [list(event.logprobs) for event in events if event.reservation_id == name]
        assert_equal([scored(answer, sampling) for answer in answers], expected(model, tokens, sampling))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("rounds", [0, 1, 3, 5, 7, 9, 12])
def test_a_cancelled_search_gives_all_blocks_of_all_beams_back(pair: Pair, rounds: int, local: bool) -> None:
    start(pair, "r", prompt(100), beams(4), local=local)
    pair.pump(rounds)
    pair.tell_decode(EndChoice(reservation_id=ReservationId("r"), choice=1))  # which is nothing to a search
    pair.cancel("r")
    pair.abort_prefill("r")
    pair.pump_until_idle()
    assert pair.take_decode(NewTokens) == []


@pytest.mark.parametrize("rounds", [2, 5, 8])
def test_unusable_logits_of_a_beam_end_the_search_and_every_block_comes_back(pair: Pair, rounds: int) -> None:
    pair.reserve("r", prompt(100), beams(4), local=True)
    pair.pump(rounds)
    pair.decode.engine.runner.pool.fill_(torch.nan)
    pair.pump_until_idle()
    over = pair.over("r")
    assert over.failure is not None
    assert over.failure.reason == "NUMERICAL_ERROR"


def test_first_tokens_that_are_too_few_for_the_search_end_it(pair: Pair) -> None:
    """A prefill worker of another version may take the request for a plain one."""
    pair.reserve("r", prompt(40), beams(4))
    pair.decode.round()
    pair.start("r", prompt(40), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    pair.claim("r")
    pair.pump_until_idle()
    over = pair.over("r")
    assert over.failure is not None
    assert f"a beam search that goes by {4 + len(STOPS)}" in over.failure.message


@pytest.mark.parametrize("decode_blocks", [64, 12])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_beams_of_a_model_with_windows_are_transformers(tmp_path: Path, architecture: str, decode_blocks: int) -> None:
    """What slides out of a window is let go of by each beam for itself, and is not copied to those that branch."""
    model = make(architecture, SHAPES[0])  # 16 tokens
    save(model, tmp_path / "model")
    pair = of(tmp_path, decode_blocks=decode_blocks)
    sampling = beams(4, max_tokens=30, stop_token_ids=(9,))
    for length in (5, 40, 100) if decode_blocks == 64 else (40,):
        for local in (False, True):
            assert_equal(serve(pair, prompt(length), sampling, local=local), expected(model, prompt(length), sampling))
