"""Beam searches before a real tiny engine, beside other requests: whatever the pool and the overlap, nothing shows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine.beams import Hypothesis, proposing
from paceline.engine.engine import Engine
from paceline.engine.runner import Runner
from paceline.engine.weights import Weights, load
from paceline.errors import EngineError
from paceline.services.decode.beams import LiveSearch
from paceline.types import RequestId, ReservationId, SamplingParams

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def weights() -> Weights:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    return load(source, TINY, dtype=torch.float32, device="cpu", seed=3)


def engine(weights: Weights, *, depth: int = 0, num_blocks: int = 256, **settings: int | float | bool) -> Engine:
    runner = Runner(TINY, weights, num_blocks=num_blocks, depth=depth)
    return Engine(TINY, weights, num_blocks=num_blocks, runner=runner, **settings)  # type: ignore[arg-type]


class Load:
    """Searches and plain requests, served by one engine as a decode worker would."""

    def __init__(self, made: Engine) -> None:
        self.engine = made
        self.searches: dict[str, LiveSearch] = {}
        self.plain: dict[str, list[int]] = {}

    def try_start(self, name: str, tokens: list[int], sampling: SamplingParams, priority: int = 0) -> bool:
        stored = len(tokens) + sampling.max_tokens - 1
        lease = self.engine.try_reserve(stored, upfront_tokens=len(tokens), prompt=tokens)
        if lease is None:
            return False
        if sampling.beam_width is None:
            self.plain[name] = []
            self.engine.add(RequestId(name), tokens, sampling, lease=lease, priority=priority)
            return True
        search = self.searches[name] = LiveSearch(self.engine, ReservationId(name), sampling, ())
        asked = proposing(sampling, ())
        self.engine.add(search.names[0], tokens, asked, lease=lease, priority=priority, proposes=True)
        return True

    def step(self) -> tuple[RequestId, ...]:
        """Who was preempted for it."""
        output = self.engine.step()
        for done in output.progress:
            assert done.error is None
            name = done.request_id.partition("#")[0]
            if name in self.plain:
                self.plain[name] += done.token_ids
            elif done.token_ids:
                self.searches[name].propose(done.request_id, done.logprobs)
        return output.preempted


def workload(seed: int) -> list[tuple[str, list[int], SamplingParams, int]]:
    draw = random.Random(seed)
    asked = []
    for number in range(7):
        tokens = draw.choices(range(TINY.vocab_size), k=draw.randint(1, 60))
        stops = tuple(draw.sample(range(TINY.vocab_size), 30))
        width = draw.choice([None, 1, 2, 3, 6])
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 30),
            temperature=0.0,
            stop_token_ids=stops,
            ignore_eos=True,
            beam_width=width,
            early_stopping=width is not None and draw.random() < 0.5,
        )
        asked.append((f"r{number}", tokens, sampling, draw.randint(-1, 1)))
    return asked


def answers(load: Load, seed: int, *, most: int = 20_000) -> dict[str, list[list[int]]]:
    waiting = workload(seed)
    while waiting or load.engine.has_work:
        most -= 1
        assert most > 0, "somebody starves"
        while waiting and load.try_start(*waiting[0]):
            waiting.pop(0)
        load.step()
    assert (load.engine.pool.free, load.engine.pool.expected) == (load.engine.pool.total, 0)
    assert all(search.over for search in load.searches.values())
    found = {name: [ids_of(each) for each in search.hypotheses] for name, search in load.searches.items()}
    return found | {name: [tokens] for name, tokens in load.plain.items()}


def ids_of(found: Hypothesis) -> list[int]:
    return [token.token_id for token in found.beam.tokens]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_blocks", "cached"), [(256, True), (12, True), (6, True), (6, False)])
@pytest.mark.parametrize("seed", range(5))
def test_searches_end_with_the_same_answers_in_whatever_company(
    weights: Weights, seed: int, num_blocks: int, cached: bool, depth: int
) -> None:
    alone: dict[str, list[list[int]]] = {}
    for each in workload(seed):
        load = Load(engine(weights, prefix_cache=False))
        assert load.try_start(*each)
        while load.engine.has_work:
            load.step()
        found = [ids_of(best) for search in load.searches.values() for best in search.hypotheses]
        alone[each[0]] = found or list(load.plain.values())
    made = engine(weights, depth=depth, num_blocks=num_blocks, prefix_cache=cached, token_budget=24, watermark=0.92)
    assert answers(Load(made), seed) == alone
    assert num_blocks == 12 or (made.stats.preemptions > 0) == (num_blocks == 6)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [1, 3, 4, 7, 12])
def test_a_search_that_is_aborted_leaves_nothing_behind(weights: Weights, steps: int, depth: int) -> None:
    load = Load(engine(weights, depth=depth, num_blocks=12, token_budget=24))
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, beam_width=6)
    assert load.try_start("r", list(range(50)), sampling)
    for _ in range(steps):
        load.step()
    load.searches["r"].abort()
    while load.engine.has_work:
        load.step()
    assert (load.engine.pool.free, load.engine.pool.expected) == (load.engine.pool.total, 0)


def test_only_who_has_proposed_can_be_told_how_to_go_on(weights: Weights) -> None:
    made = engine(weights)
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=3)
    lease = made.try_reserve(5)
    assert lease is not None
    made.add(RequestId("r"), [1, 2, 3], sampling, lease=lease, proposes=True)
    for act in (lambda: made.extend(RequestId("r"), 5), lambda: made.branch(RequestId("r"), RequestId("b"), 5)):
        with pytest.raises(EngineError, match="request r has proposed nothing"):
            act()
    [done] = made.step().progress
    assert (len(done.token_ids), done.ended) == (3, False)
    assert made.step().progress == []
    assert not made.has_work
    made.branch(RequestId("r"), RequestId("b"), done.token_ids[1])
    made.extend(RequestId("r"), done.token_ids[0])
    assert {each.request_id for each in made.step().progress} == {"r", "b"}
    assert made.stats.output_tokens == 2
    assert made.load.running == 2
    for name in ("r", "b"):
        assert made.abort(RequestId(name))
    assert made.pool.free == made.pool.total


def test_no_beam_is_said_to_propose_without_saying_how_many(weights: Weights) -> None:
    made = engine(weights)
    for asked in ({"proposes": True}, {"proposes": True, "hold": True}):
        lease = made.try_reserve(5)
        assert lease is not None
        with pytest.raises(EngineError, match="proposes an unknown number"):
            made.add(RequestId("r"), [1], SamplingParams(max_tokens=2, temperature=0.0), lease=lease, **asked)
        lease.release()


def test_the_rank_of_a_branch_is_its_parents(weights: Weights) -> None:
    """Another request came in between: the search's later beams are not behind it, and it makes room for them."""
    load = Load(engine(weights, num_blocks=9))
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, beam_width=6)
    assert load.try_start("first", list(range(40)), sampling)
    later = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert load.try_start("later", list(range(100, 105)), later)
    preempted: list[RequestId] = []
    while load.engine.has_work and not preempted:
        preempted += load.step()
    assert preempted[0] == "later"
