"""Many requests on small pools: cached, handed over, computed here, cancelled, re-targeted, preempted, in choices.

Whatever befalls a request, its tokens are those of a run in which nothing does, and every block comes back.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.services.decode.messages import NewTokens, Over, WriteGranted
from paceline.testing.pair import Pair
from paceline.types import SamplingParams, blocks_to_admit

BLOCKS = 30
REQUESTS = 60


@dataclass
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    local: bool
    priority: int
    salt: str
    cancel_after: int | None  # rounds
    rounds: int = 0


def requests(chance: random.Random) -> dict[str, Asked]:
    beginnings = [chance.choices(range(500), k=chance.randint(20, 160)) for _ in range(4)]
    asked: dict[str, Asked] = {}
    for number in range(REQUESTS):
        beginning = chance.choice(beginnings)
        prompt = beginning[: chance.randint(1, len(beginning))] + chance.choices(range(500), k=chance.randint(1, 40))
        sampling = SamplingParams(
            max_tokens=chance.choice([1, 2, 9, 40, 150]),
            temperature=chance.choice([0.0, 1.1]),
            seed=number,
            ignore_eos=True,
            n=chance.choice([1, 1, 1, 3]),
            repetition_penalty=chance.choice([1.0, 1.3]),
        )
        asked[f"r{number}"] = Asked(
            prompt,
            sampling,
            local=chance.random() < 0.3,
            priority=chance.randint(-1, 1),
            salt=chance.choice(["", "", "", "other"]),
            cancel_after=chance.randint(0, 30) if chance.random() < 0.25 else None,
        )
    return asked


def told(pair: Pair) -> dict[tuple[str, int], list[int]]:
    """Tokens by request and choice; removes them."""
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in pair.take_decode(NewTokens):
        answer = answers[event.reservation_id, event.choice]
        assert event.index == len(answer), "no token is lost, and none told twice"
        answer += event.ids
    return answers


def undisturbed(folder: Path, asked: dict[str, Asked]) -> dict[tuple[str, int], list[int]]:
    pair = Pair(folder, decode_blocks=200, prefix_cache=False)
    for name, each in asked.items():
        pair.reserve(name, each.prompt, each.sampling, local=True)
        pair.pump_until_idle()
    return told(pair)


@pytest.mark.parametrize(("seed", "overlapped"), [(0, False), (1, False), (0, True)])
def test_every_request_gets_the_tokens_of_an_undisturbed_run(tmp_path: Path, seed: int, overlapped: bool) -> None:
    chance = random.Random(seed)
    asked = requests(chance)
    expected = undisturbed(tmp_path, asked)
    pair = Pair(tmp_path, prefill_blocks=40, decode_blocks=BLOCKS, overlapped=overlapped)
    waiting, live, handed = list(asked), set[str](), set[str]()
    ends: dict[str, Over] = {}
    for _ in range(40_000):
        if waiting and chance.random() < 0.5:
            each = asked[waiting[0]]
            room = blocks_to_admit(len(each.prompt), each.sampling.max_tokens)
            if pair.decode.load.headroom_blocks >= room and pair.prefill.load.headroom_blocks >= room:
                name = waiting.pop(0)
                live.add(name)
                pair.reserve(name, each.prompt, each.sampling, local=each.local, priority=each.priority, salt=each.salt)
                if not each.local:
                    pair.decode.round()
                    pair.start(name, each.prompt, each.sampling, salt=each.salt)
                    pair.claim(name)
                    handed.add(name)
        for name in sorted(live):
            each = asked[name]
            each.rounds += 1
            if each.rounds == each.cancel_after:
                pair.cancel(name)
                pair.abort_prefill(name)
            elif each.rounds == 3 and name in handed and chance.random() < 0.1:
                pair.retarget(name, local=True)
                pair.abort_prefill(name)
        pair.hub.hold = chance.random() < 0.2
        pair.pump()
        for first in pair.first_tokens():
            name = first.attempt.reservation_id
            if first.finish is not None and name in live:
                pair.cancel(name)  # as the router does: nothing lands
                expected = {key: tokens for key, tokens in expected.items() if key[0] != name}
        for over in pair.take_decode(Over):
            assert over.reservation_id not in ends, "an end is told once"
            ends[over.reservation_id] = over
            live.discard(over.reservation_id)
        if not waiting and not live and pair.idle:
            break
    assert set(ends) == set(asked)
    assert pair.idle
    answers = told(pair)
    for (name, choice), tokens in expected.items():
        answer = answers.get((name, choice), [])
        if asked[name].cancel_after is None:
            assert ends[name].failure is None, name
            assert answer == tokens, (name, choice)
        else:
            assert answer == tokens[: len(answer)], (name, choice)
    stats = pair.decode.engine.stats
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert pair.take_decode(WriteGranted) == []
