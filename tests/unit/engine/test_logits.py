"""What penalties, biases, exclusions and min-p make of logits, against loops that say it token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.logits import Shaping, TokenCounts, shape
from paceline.engine.sampler import DrawPoint, sample
from paceline.types import SamplingParams

VOCAB = 12
EOS = (1, 2)


def shaping(sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()) -> Shaping | None:
    made = Shaping.of(sampling, prompt, EOS)
    if made is not None:
        made.catch_up([*prompt, *output])
    return made


def said(row: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The definition, one token at a time."""
    values = list(row)
    for token in range(len(values)):
        if token in prompt or token in output:
            penalty = sampling.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= sampling.presence_penalty * (token in output)
        values[token] -= sampling.frequency_penalty * list(output).count(token)
        values[token] += dict(sampling.logit_bias).get(token, 0.0)
    excluded = {token for token, bias in sampling.logit_bias if bias <= -100}
    if len(output) < sampling.min_tokens:
        excluded |= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
    values = [-math.inf if token in excluded else value for token, value in enumerate(values)]
    if sampling.min_p > 0 and not sampling.greedy:
        least = max(values) + sampling.temperature * math.log(sampling.min_p)
        values = [-math.inf if value < least else value for value in values]
    return values


token_ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (5,), (5, 7)]),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(3, 9), st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=3).map(
        lambda chosen: tuple(sorted(chosen.items()))
    ),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(samplings, st.lists(token_ids, min_size=1, max_size=6), st.lists(token_ids, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1000),
)
def test_every_row_of_a_batch_is_shaped_as_the_definition_says(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    shaped = shape(logits, [shaping(*row) for row in rows])
    expected = torch.tensor([said(row.tolist(), *asked) for row, asked in zip(logits, rows, strict=True)])
    torch.testing.assert_close(shaped, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_penalties_count_as_they_are_defined_for_a_prompt_that_repeats_itself() -> None:
    """F18: repetition counts prompt and output; presence and frequency count the output alone."""
    prompt, row = [3, 3, 3], torch.ones(1, VOCAB)

    def at(token: int, output: Sequence[int] = (), **penalty: float) -> float:
        return shape(row, [shaping(msgspec.structs.replace(SamplingParams(), **penalty), prompt, output)])[
            0, token
        ].item()

    assert at(3, repetition_penalty=2.0) == 0.5
    assert at(3, presence_penalty=1.0) == at(3, frequency_penalty=1.0) == 1.0
    assert at(3, [3, 3], repetition_penalty=2.0) == 0.5
    assert at(3, [3, 3], presence_penalty=1.0) == 0.0
    assert at(3, [3, 3], frequency_penalty=1.0) == -1.0


def test_counts_grow_with_the_output_and_count_nothing_twice() -> None:
    sampling = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5)
    tokens, made = [4, 4], Shaping.of(sampling, [4, 4], EOS)
    assert made is not None and made.counts is not None
    for step in range(300):
        tokens.append(step % 150)
        made.catch_up(tokens)
        made.catch_up(tokens)
    assert sorted(made.counts.ids.tolist()) == list(range(150))
    assert made.counts.counts.tolist() == [2] * 150


def test_a_prompt_of_one_vocabulary_counts_each_token_once() -> None:
    counts = TokenCounts(list(range(200)) * 3)
    assert (counts.ids.tolist(), set(counts.counts.tolist())) == (list(range(200)), {0})


def test_a_neutral_request_costs_nothing_and_leaves_the_very_tensor() -> None:
    assert Shaping.of(SamplingParams(stop_token_ids=(3,), top_p=0.9), [1, 2], EOS) is None
    logits = torch.zeros(2, VOCAB)
    assert shape(logits, [None, None]) is logits


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias=((3, -100.0),)),
        SamplingParams(logit_bias=((3, -100.0),), temperature=100.0, top_k=5),
        SamplingParams(stop_token_ids=(3,), min_tokens=1, top_p=0.999),
        SamplingParams(logit_bias=((3, -100.0),), temperature=0.0),
    ],
)
def test_an_excluded_token_is_never_chosen_however_likely(sampling: SamplingParams) -> None:
    """F49, first half: a biased id never appears; it is excluded, not made unlikely."""
    row = torch.zeros(1, VOCAB)
    row[0, 3] = 1e4
    points = [DrawPoint(sampling, position, shaping=shaping(sampling, [5])) for position in range(500)]
    found = sample(row.expand(500, -1), points)
    assert found.bad == frozenset()
    assert 3 not in found.token_ids


def test_a_row_without_any_token_left_is_bad_and_its_neighbours_are_not() -> None:
    sampling = SamplingParams(logit_bias=tuple((token, -100.0) for token in range(3, VOCAB)), min_tokens=1)
    every = msgspec.structs.replace(sampling, logit_bias=((0, -100.0), *sampling.logit_bias))
    points = [DrawPoint(each, 1, shaping=shaping(each, [5])) for each in (sampling, every)]
    found = sample(torch.zeros(2, VOCAB), points)
    assert found.bad == {1}
    assert found.token_ids[0] == 0
