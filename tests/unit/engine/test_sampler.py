"""Draws that depend on nothing but their key, follow the distribution, and never take an excluded token."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.sampler import DrawPoint, sample
from paceline.kernels.reference import exponential_noise, mix64, sampling_keys
from paceline.types import SamplingParams

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)


def logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row: torch.Tensor, sampling: SamplingParams, count: int) -> torch.Tensor:
    """`count` tokens from the same logits, each at its own position."""
    points = [DrawPoint(sampling, position) for position in range(count)]
    return torch.tensor(sample(row.expand(count, -1), points).token_ids)


def reference_mix64(z: int) -> int:
    """SplitMix64's finaliser in unbounded integers, as it is published."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(0, 2**64 - 1))
def test_the_mix_is_splitmix64s(value: int) -> None:
    signed = value - 2**64 if value >= 2**63 else value
    assert mix64(torch.tensor([signed])).item() % 2**64 == reference_mix64(value)


def test_the_generator_matches_splitmix64s_published_first_outputs() -> None:
    golden = 0x9E3779B97F4A7C15
    outputs = [reference_mix64((1234567 + n * golden) % 2**64) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    noise = exponential_noise(torch.tensor([[1234567]]), torch.tensor([[0, 1, 2]]))
    expected = [((output >> 12) + 0.5) / 2**52 for output in outputs]
    torch.testing.assert_close(-torch.expm1(-noise[0]), torch.tensor(expected, dtype=torch.float64))


def test_noise_is_positive_finite_and_exponential() -> None:
    noise = exponential_noise(sampling_keys(*torch.arange(12).view(3, 4))[:, None], torch.arange(50_000)[None])
    assert bool((noise > 0).all() & noise.isfinite().all())
    assert abs(noise.mean().item() - 1) < 0.01
    assert abs(noise.var().item() - 1) < 0.03
    assert abs(torch.corrcoef(noise).fill_diagonal_(0).abs().max().item()) < 0.02


def test_keys_tell_seed_choice_and_position_apart() -> None:
    grid = torch.cartesian_prod(torch.arange(8), torch.arange(8), torch.arange(64))
    assert len(set(sampling_keys(*grid.unbind(1)).tolist())) == len(grid)


def test_greedy_takes_the_most_likely_and_of_equals_the_lowest_id() -> None:
    """F15, for a temperature of 0 and a top-k of 1 alike."""
    rows = torch.zeros(3, 5)
    rows[0, 3] = rows[1, [2, 4]] = 1.0
    top_k_1 = SamplingParams(temperature=1.0, top_k=1)
    assert sample(rows, [DrawPoint(GREEDY, 9), DrawPoint(GREEDY, 9), DrawPoint(top_k_1, 9)]).token_ids == [3, 2, 0]


def test_no_rows_are_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), []).token_ids == []


settings_of_a_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 40, 299, 5_000]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(deadline=None)
@given(st.lists(st.tuples(settings_of_a_row, st.integers(0, 100_000)), min_size=1, max_size=6), st.integers(0, 100))
def test_a_row_is_independent_of_its_batch(rows: list[tuple[SamplingParams, int]], seed: int) -> None:
    values = logits(len(rows), seed=seed)
    points = [DrawPoint(sampling, position) for sampling, position in rows]
    together = sample(values, points).token_ids
    alone = [sample(values[row : row + 1], [point]).token_ids[0] for row, point in enumerate(points)]
    assert together == alone


def test_a_row_cut_by_a_wide_sort_is_the_same_beside_one_that_needs_it() -> None:
    """A flat row makes the whole batch sort its full vocabulary, past NUCLEUS_WIDTH; a peaked one alone does not."""
    peaked, flat = logits(1, 4_000) * 3, torch.zeros(1, 4_000)
    point = DrawPoint(SamplingParams(temperature=1.0, top_p=0.9, seed=5), 17)
    both = sample(torch.cat([peaked, flat]), [point, point]).token_ids
    assert both == [*sample(peaked, [point]).token_ids, *sample(flat, [point]).token_ids]


def test_a_draw_depends_on_seed_and_position_and_on_nothing_before() -> None:
    row = torch.zeros(1, VOCAB)
    sampling = SamplingParams(seed=1)
    tokens = draws(row, sampling, 64)
    assert torch.equal(tokens, draws(row, sampling, 64))
    assert not torch.equal(tokens, draws(row, msgspec.structs.replace(sampling, seed=2), 64))
    assert len(set(tokens.tolist())) > 32


def test_a_seed_uses_all_its_64_bits() -> None:
    row = torch.zeros(1, VOCAB)
    high, low = SamplingParams(seed=2**63 + 1), SamplingParams(seed=1)
    assert not torch.equal(draws(row, high, 16), draws(row, low, 16))


@pytest.mark.parametrize("sampling", [SamplingParams(seed=3), SamplingParams(seed=4, temperature=0.5)])
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """Chi-squared over 10 tokens, 9 degrees of freedom: 33.7 is passed once in 10,000 runs, and this run is fixed."""
    row, count = logits(1, 10), 20_000
    observed = torch.bincount(draws(row, sampling, count), minlength=10).double()
    expected = (row[0].double() / sampling.temperature).softmax(-1) * count
    assert ((observed - expected) ** 2 / expected).sum().item() < 33.7


def test_top_k_keeps_k_tokens_in_their_proportions() -> None:
    row, count = logits(1, 10), 20_000
    observed = torch.bincount(draws(row, SamplingParams(top_k=3), count), minlength=10).double()
    best = row[0].topk(3)
    assert set(observed.nonzero()[:, 0].tolist()) == set(best.indices.tolist())
    expected = best.values.double().softmax(-1) * count
    assert ((observed[best.indices] - expected) ** 2 / expected).sum().item() < 18.4  # 2 degrees of freedom


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, kept in ((0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}), (0.71, {0, 1, 2}), (0.95, {0, 1, 2, 3})):
        assert set(draws(row, SamplingParams(top_p=top_p), 500).tolist()) == kept


def test_top_p_counts_what_top_k_left() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()  # of the first two, 0 has 4/7
    assert set(draws(row, SamplingParams(top_k=2, top_p=0.5), 500).tolist()) == {0}
    assert set(draws(row, SamplingParams(top_k=2, top_p=0.6), 500).tolist()) == {0, 1}


def test_tokens_as_likely_as_the_last_one_in_stay_in() -> None:
    row = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]])
    assert set(draws(row, SamplingParams(top_k=2), 500).tolist()) == {0, 1, 2, 3}


def test_an_extreme_temperature_neither_fails_nor_leaves_the_best_token() -> None:
    row = logits(1)
    best = row.argmax().item()
    assert set(draws(row, SamplingParams(temperature=1e-300), 50).tolist()) == {best}
    assert len(set(draws(row, SamplingParams(temperature=100.0), 50).tolist())) > 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9)])
def test_a_row_of_unusable_logits_is_named_and_its_neighbours_are_untouched(
    value: float, sampling: SamplingParams
) -> None:
    """F56, at the logits themselves."""
    rows = logits(3)
    points = [DrawPoint(sampling, 5)] * 3
    expected = sample(rows, points)
    assert expected.bad == frozenset()
    rows[1, 7] = value
    found = sample(rows, points)
    assert found.bad == {1}
    assert [found.token_ids[0], found.token_ids[2]] == [expected.token_ids[0], expected.token_ids[2]]
