"""Field reports about sampling, each as a kind: on a prefill and a decode engine, both real, and on one alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from paceline.services.decode.messages import Over
from paceline.testing.pair import Pair
from paceline.types import FinishReason, ReservationId, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [7 * i % 500 + 3 for i in range(40)]
REPEATED = [77, 78] * 20


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def hand_over(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    pair.reserve(name, prompt, sampling)
    pair.decode.round()
    pair.start(name, prompt, sampling)
    pair.claim(name)


def answer(
    pair: Pair, prompt: list[int], sampling: SamplingParams, *, local: bool
) -> tuple[list[int], FinishReason | None, int]:
    """(token ids, finish, completion tokens) as the router would have them of both workers."""
    if local:
        pair.reserve("r", prompt, sampling, local=True)
        pair.pump_until_idle()
        over = pair.over("r")
        return pair.tokens("r"), over.finish, over.completion_tokens
    hand_over(pair, "r", prompt, sampling)
    pair.pump(30)
    [first] = pair.first_tokens()
    if first.finish is not None:
        pair.cancel("r")
    pair.pump_until_idle()
    over = pair.over("r")
    if first.finish is not None:
        return first.tokens, first.finish, len(first.tokens)
    told = pair.tokens("r")
    assert told[:1] == first.tokens, "the first token comes once, from both workers alike"
    return told, over.finish, over.completion_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
@pytest.mark.parametrize("stop_at", [None, 0, 1, 2, 7])
def test_ids_and_counts_are_a_single_process_s_whatever_ends_the_answer(
    pair: Pair, max_tokens: int, stop_at: int | None
) -> None:
    """F11: the first token is not dropped, the last not sent twice, and both are counted once."""
    plain = answer(pair, PROMPT, GREEDY, local=True)[0]
    stop = () if stop_at is None else (plain[stop_at],)
    sampling = msgspec.structs.replace(GREEDY, max_tokens=max_tokens, stop_token_ids=stop)
    single = answer(pair, PROMPT, sampling, local=True)
    assert answer(pair, PROMPT, sampling, local=False) == single
    assert single[2] == len(single[0])


@pytest.mark.parametrize("minimum", [1, 4, 8])
def test_before_min_tokens_nothing_ends_an_answer_on_either_tier(pair: Pair, minimum: int) -> None:
    plain = answer(pair, PROMPT, GREEDY, local=True)[0]
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=tuple(plain), min_tokens=minimum)
    handed, finish, count = answer(pair, PROMPT, sampling, local=False)
    assert not set(plain) & set(handed[:minimum])
    assert count >= minimum
    assert (handed, finish, count) == answer(pair, PROMPT, sampling, local=True)


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.25},
    ],
    ids=str,
)
def test_penalties_are_the_same_cold_from_the_cache_and_through_the_hand_off(
    pair: Pair, penalties: dict[str, float]
) -> None:
    """F18: a decode worker knows the prompt that another computed, and a cached prompt counts as any other."""
    sampling = msgspec.structs.replace(GREEDY, max_tokens=20, **penalties)
    handed = answer(pair, REPEATED, sampling, local=False)
    again = answer(pair, REPEATED, sampling, local=False)  # its blocks are cached on both sides now
    cold = Pair(Path("unused"), prefix_cache=False)
    assert handed == again == answer(cold, REPEATED, sampling, local=True)
    plain = msgspec.structs.replace(GREEDY, max_tokens=20)
    assert handed[0] != answer(pair, REPEATED, plain, local=True)[0]


def test_presence_and_frequency_leave_the_first_token_alone_however_the_prompt_repeats(pair: Pair) -> None:
    """F18: they count the output, of which there is none yet."""
    first = answer(pair, REPEATED, GREEDY, local=True)[0][0]
    for penalties in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        sampling = msgspec.structs.replace(GREEDY, **penalties)
        assert (
            answer(pair, [*REPEATED, first, *REPEATED], sampling, local=True)[0][0]
            == (answer(pair, [*REPEATED, first, *REPEATED], GREEDY, local=True)[0][0])
        )


def test_temperature_0_and_top_k_1_are_the_same_in_one_batch(pair: Pair) -> None:
    """F15."""
    prompts = [PROMPT[start : start + 9] for start in range(0, 30, 2)]
    for number, prompt in enumerate(prompts):
        pair.reserve(f"zero {number}", prompt, GREEDY, local=True)
        one = msgspec.structs.replace(GREEDY, temperature=1.0, top_k=1, seed=number)
        pair.reserve(f"one {number}", prompt, one, local=True)
    pair.pump_until_idle()
    for number in range(len(prompts)):
        assert pair.tokens(f"zero {number}") == pair.tokens(f"one {number}")


@pytest.mark.parametrize("others_seed", [None, 42, 7])
def test_a_seeded_answer_is_the_same_beside_others_seeded_or_not(pair: Pair, others_seed: int | None) -> None:
    """F13."""
    seeded = SamplingParams(max_tokens=12, temperature=0.8, seed=42, ignore_eos=True)
    alone = answer(pair, PROMPT, seeded, local=True)[0]
    if others_seed is not None:
        for number in range(5):
            other = msgspec.structs.replace(seeded, seed=others_seed + number)
            pair.reserve(f"other {number}", PROMPT[number:], other, local=True)
    pair.reserve("a", PROMPT, seeded, local=True)
    pair.pump_until_idle()
    assert pair.tokens("a") == alone


@pytest.mark.parametrize("sampling", [GREEDY, msgspec.structs.replace(GREEDY, temperature=1.0, top_p=0.9)], ids=str)
def test_a_request_with_nan_logits_fails_alone_and_leaves_nothing_in_the_cache(
    pair: Pair, sampling: SamplingParams
) -> None:
    """F56, where the NaN comes from the KV of one of four requests."""
    prompts = [[number + 1, *PROMPT[:30]] for number in range(4)]
    expected = [answer(pair, prompt, sampling, local=True)[0] for prompt in prompts]
    fresh = Pair(Path("unused"))
    engine = fresh.decode.engine
    for number, prompt in enumerate(prompts):
        fresh.reserve(f"r{number}", prompt, sampling, local=True)
    told: list[int] = []
    while not told:
        fresh.pump()
        told = fresh.tokens("r1")
    [poisoned] = [each for each in engine._scheduler.requests if each.request_id == "r1"]
    engine.runner.pool[poisoned.lease.blocks[0]] = torch.nan
    fresh.pump_until_idle()
    ended = {over.reservation_id: over for over in fresh.take_decode(Over)}
    over = [ended[ReservationId(f"r{number}")] for number in range(4)]
    assert over[1].failure is not None
    assert over[1].failure.reason == "NUMERICAL_ERROR"
    for number in (0, 2, 3):
        assert over[number].failure is None
        assert fresh.tokens(f"r{number}") == expected[number]
    assert engine.stats.requests_failed == 1
    assert answer(fresh, prompts[1], sampling, local=True)[0] == expected[1]
