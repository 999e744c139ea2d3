"""Log-probabilities: the model's own, of the rows that ask, and of prompts in pieces that do not grow with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.engine import scoring
from paceline.engine.engine import Engine
from paceline.engine.logits import Shaping
from paceline.engine.sampler import DrawPoint, sample
from paceline.engine.weights import load
from paceline.types import RequestId, SamplingParams, TokenLogprob

TINY = SHAPES["tiny"]
PROMPT = [11 * i % 500 for i in range(100)]


def engine() -> Engine:
    source = resolve("dummy:tiny", cache_dir=Path("unused"))
    weights = load(source, TINY, dtype=torch.float32, device="cpu", seed=3)
    return Engine(TINY, weights, num_blocks=32, token_budget=48)


def scores(made: Engine, prompt: list[int], number: int) -> tuple[TokenLogprob, ...]:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=number, ignore_eos=True)
    lease = made.try_reserve(len(prompt) + 1)
    assert lease is not None
    made.add(RequestId("a"), prompt, sampling, lease=lease)
    found: tuple[TokenLogprob, ...] = ()
    while made.has_work:
        for done in made.step().progress:
            assert not (found and done.prompt_logprobs), "they come once"
            found = found or done.prompt_logprobs
    return found


def test_they_are_the_models_own_whatever_the_request_makes_of_its_logits() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 3
    sampling = SamplingParams(
        temperature=3.0, logit_bias=((4, -100.0), (5, 9.0)), repetition_penalty=2.0, seed=1, logprobs=4
    )
    shaping = Shaping.of(sampling, [1, 2, 3], ())
    found = sample(row.expand(2, -1), [DrawPoint(sampling, 3, shaping=shaping), DrawPoint(SamplingParams(seed=2), 3)])
    [logprob, nothing] = found.logprobs
    expected = row[0].log_softmax(-1)
    assert nothing is None
    assert logprob is not None
    assert logprob.token_id == found.token_ids[0]
    assert logprob.logprob == pytest.approx(expected[logprob.token_id].item())
    assert [token for token, _ in logprob.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(expected.topk(4).values.tolist())


def test_nobody_who_asks_means_nothing_computed() -> None:
    assert sample(torch.zeros(1, 5), [DrawPoint(SamplingParams(), 1)]).logprobs == ()


def test_a_prompt_is_scored_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """F09: logits of all of a prompt never exist at once, however long it is."""
    whole = scores(engine(), PROMPT, 3)
    taken: list[int] = []
    take = scoring.Scoring.take

    def watched(self: scoring.Scoring, logits: torch.Tensor) -> None:
        taken.append(logits.numel())
        take(self, logits)

    monkeypatch.setattr(scoring, "PIECE_ELEMENTS", 4 * TINY.vocab_size)
    monkeypatch.setattr(scoring.Scoring, "take", watched)
    found = scores(engine(), PROMPT, 3)
    assert max(taken) == 4 * TINY.vocab_size
    assert sum(taken) == len(PROMPT[1:]) * TINY.vocab_size
    assert [each.token_id for each in found] == [each.token_id for each in whole] == PROMPT[1:]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in whole], abs=1e-5)


def test_a_scored_prompt_passes_the_cache_by() -> None:
    made = engine()
    first = scores(made, PROMPT, 1)
    again = scores(made, PROMPT, 1)
    assert len(first) == len(again) == len(PROMPT) - 1
    assert made.stats.prompt_tokens_computed == 2 * len(PROMPT)


def test_a_prompt_of_one_token_has_no_scores() -> None:
    assert scores(engine(), PROMPT[:1], 1) == ()
