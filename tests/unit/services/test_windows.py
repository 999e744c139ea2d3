"""Models with windows, from a prefill engine through a decode engine, both real: what will be read is sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.services.decode.messages import NewTokens, Over
from paceline.services.prefill.messages import PrefillFailed
from paceline.testing.chunked import expected
from paceline.testing.pair import Pair
from paceline.testing.random_models import SHAPES, VOCAB_SIZE, make, save
from paceline.types import SamplingParams, blocks_to_admit

SHAPE = SHAPES[1]
WINDOW = SHAPE.window  # 33 tokens: a token more than two blocks
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=40, temperature=1.3, top_p=0.9, seed=42, ignore_eos=True)
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=200)
LENGTHS = (1, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 66, 80, 81, 95, 96, 97, 150)


@dataclass(frozen=True)
class Windowed:
    """A checkpoint, what transformers makes of it, and how many KV groups see everything, or a window."""

    folder: Path
    oracle: Any
    full: int
    windowed: int

    def landed(self, num_prompt: int, held_tokens: int = 0) -> int:
        """Blocks that a decode worker needs: all of some groups, and those with a token that the next one sees."""
        held, end = held_tokens // 16, -(-num_prompt // 16)
        seen = [block for block in range(held, end) if 16 * block + 16 > num_prompt - WINDOW + 1]
        return self.full * (end - held) + self.windowed * len(seen)


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make(request.param, SHAPE)
    save(oracle, folder)
    return Windowed(folder, oracle, *((1, 2) if request.param == "gemma3" else (0, 1)))


@pytest.fixture
def made(windowed: Windowed, tmp_path: Path) -> Callable[..., Pair]:
    def make_pair(**settings: Any) -> Pair:
        return Pair(tmp_path, model=str(windowed.folder), **settings)

    return make_pair


@pytest.fixture
def pair(made: Callable[..., Pair]) -> Pair:
    return made()


def alone(pair: Pair, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The answer of a decode worker that computes the whole prompt itself."""
    pair.reserve("alone", prompt, sampling, local=True, salt="alone")
    pair.pump_until_idle()
    pair.over("alone")
    return pair.tokens("alone")


def serve(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
    pair.hand_over(name, prompt, sampling)
    pair.pump_until_idle()
    return pair.tokens(name)


@pytest.mark.parametrize("num_prompt", LENGTHS)
def test_a_handed_over_prompt_gives_the_tokens_of_a_single_process_and_of_transformers(
    windowed: Windowed, made: Callable[..., Pair], num_prompt: int
) -> None:
    pair, prompt = made(prefix_cache=False), PROMPT[:num_prompt]
    answer = serve(pair, "r", prompt, GREEDY)
    assert len(answer) == 20
    assert pair.over("r").blocks_landed == windowed.landed(num_prompt)
    assert answer == alone(pair, prompt, GREEDY)
    assert answer == expected(windowed.oracle, prompt, answer).argmax(-1).tolist()


# The decode worker was sent what a token at 48 sees, which is less than one at 32 does.
@pytest.mark.parametrize(("num_prompt", "held"), [(17, 16), (48, 0), (49, 48), (66, 64), (97, 96), (150, 144)])
def test_a_prompt_that_comes_again_is_found_as_far_as_a_window_is_whole(
    windowed: Windowed, pair: Pair, num_prompt: int, held: int
) -> None:
    prompt = PROMPT[:num_prompt]
    first = serve(pair, "a", prompt, DRAWN)
    pair.over("a")
    second = serve(pair, "b", prompt, DRAWN)
    over = pair.over("b")
    assert first == second == alone(pair, prompt, DRAWN)
    assert [each.cached_tokens for each in pair.first_tokens()] == [0, (num_prompt - 1) // 16 * 16]
    assert (over.cached_tokens, over.blocks_landed) == (held, windowed.landed(num_prompt, held))


def test_a_chat_goes_on_behind_an_answer_whose_beginning_has_slid_out(pair: Pair) -> None:
    said = PROMPT[:60]
    for turn in range(4):
        answer = serve(pair, str(turn), said, DRAWN)
        held = pair.over(str(turn)).cached_tokens
        assert answer == alone(pair, said, DRAWN)
        assert held == (0 if turn == 0 else (len(said) - 11) // 16 * 16)
        said = said + answer + PROMPT[turn : turn + 10]


def test_choices_share_a_prompt_and_slide_each_for_itself(pair: Pair) -> None:
    sampling = msgspec.structs.replace(DRAWN, n=3)

    def told() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for event in pair.take_decode(NewTokens):
            found.setdefault(event.choice, []).extend(event.ids)
        return found

    pair.hand_over("r", PROMPT[:70], sampling)
    pair.pump_until_idle()
    apart = told()
    pair.reserve("l", PROMPT[:70], sampling, local=True, salt="l")
    pair.pump_until_idle()
    assert apart == told()
    assert {choice: len(ids) for choice, ids in apart.items()} == {0: 40, 1: 40, 2: 40}
    assert len({tuple(ids) for ids in apart.values()}) == 3


def test_requests_that_make_room_give_the_tokens_of_an_undisturbed_run(
    windowed: Windowed, made: Callable[..., Pair]
) -> None:
    pair = made(decode_blocks=14, watermark=1.0)
    sampling = msgspec.structs.replace(DRAWN, max_tokens=120)
    prompts = {name: PROMPT[i : i + 30] for i, name in enumerate("abc")}
    wanted = {name: alone(pair, prompt, sampling) for name, prompt in prompts.items()}
    before = pair.decode.engine.stats.preemptions
    for index, (name, prompt) in enumerate(prompts.items()):
        pair.reserve(name, prompt, sampling, local=index == 0)
        pair.decode.round()
        if index:
            pair.start(name, prompt, sampling)
            pair.claim(name)
    pair.pump_until_idle()
    # One whose tables all have windows ends with what it came with.
    assert (pair.decode.engine.stats.preemptions > before) == (windowed.full > 0)
    assert {name: pair.tokens(name) for name in prompts} == wanted


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_attempt_that_failed_is_made_again_elsewhere_with_the_same_tokens(pair: Pair, local: bool, n: int) -> None:
    sampling = msgspec.structs.replace(GREEDY, n=n)
    serve(pair, "warm", PROMPT[:70], GREEDY)
    prompt = PROMPT[:150]
    pair.hand_over("r", prompt, sampling)
    pair.hub.fail_next = 1
    pair.pump(8)
    assert len(pair.take_prefill(PrefillFailed)) == 1
    pair.retarget("r", local=local)
    pair.decode.round()
    if not local:
        pair.start("r", prompt, sampling, attempt=2)
        assert pair.claim("r", attempt=2).held_tokens == 64
    pair.pump_until_idle()
    answers: dict[int, list[int]] = {}
    for event in pair.take_decode(NewTokens):
        if event.reservation_id == "r":
            answers.setdefault(event.choice, []).extend(event.ids)
    wanted = alone(pair, prompt, GREEDY)
    assert answers == dict.fromkeys(range(n), wanted)


@pytest.mark.parametrize("rounds", range(8))
def test_a_request_that_is_cancelled_at_any_time_leaves_nothing_behind(pair: Pair, rounds: int) -> None:
    pair.hand_over("r", PROMPT[:150], DRAWN)
    pair.pump(rounds)
    pair.cancel("r")
    pair.abort_prefill("r")
    pair.pump_until_idle()
    assert len(pair.take_decode(Over)) == 1
    assert serve(pair, "s", PROMPT[:150], DRAWN) == alone(pair, PROMPT[:150], DRAWN)


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_in_small_pools_answer_as_alone_and_leave_every_block_free(
    windowed: Windowed, made: Callable[..., Pair], seed: int
) -> None:
    chance = random.Random(seed)
    pair = made(prefill_blocks=16, decode_blocks=18)
    beginnings = [PROMPT[start : start + 100] for start in (0, 30)]
    asks = {}
    for number in range(14):
        tail = chance.choices(range(VOCAB_SIZE), k=chance.randint(1, 60))
        prompt = chance.choice(beginnings)[: chance.randint(0, 100)] + tail
        asks[str(number)] = (prompt, msgspec.structs.replace(DRAWN, max_tokens=chance.randint(2, 60), seed=number))
    waiting = dict(asks)
    for _ in range(3_000):
        for name, (prompt, sampling) in list(waiting.items()):
            here, there = pair.decode.engine, pair.prefill.engine
            room = blocks_to_admit(len(prompt), sampling.max_tokens, here.limits.most_blocks)
            if here.load.headroom_blocks < room or there.load.headroom_blocks < room:
                break
            del waiting[name]
            local = chance.random() < 0.3
            pair.reserve(name, prompt, sampling, local=local)
            pair.decode.round()
            if not local:
                pair.start(name, prompt, sampling)
                pair.claim(name)
                pair.prefill.round()
        pair.pump()
        if not waiting and pair.idle:
            break
    assert pair.idle
    for name, (prompt, sampling) in asks.items():
        assert pair.tokens(name) == alone(pair, prompt, sampling), name
