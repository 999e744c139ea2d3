"""The narrow draw takes the very token of the twin, or says that it cannot know."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.narrow_draw import WIDTHS, narrow_draw
from paceline.kernels.reference import sample, sampling_keys

rows_of_parameters = st.tuples(
    st.sampled_from([0.2, 1.0, 3.0, 100.0]),
    st.sampled_from([(0, 0.9), (0, 0.3), (1, 1.0), (40, 1.0), (40, 0.5), (256, 1.0), (257, 0.9), (5000, 0.99)]),
    st.sampled_from([0.1, 1.0, 4.0]),  # how peaked
    st.integers(-(2**63), 2**63 - 1),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(rows_of_parameters, min_size=1, max_size=5),
    st.integers(0, 100),
    st.sampled_from([40, 300, 3000]),
    st.sampled_from([10, 256]),
)
def test_a_certain_row_is_the_twins_token(
    rows: list[tuple[float, tuple[int, float], float, int]], seed: int, vocab: int, width: int
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    logits = (logits * torch.tensor([[peaked] for _, _, peaked, _ in rows])).round(decimals=1)  # with ties
    temperature = torch.tensor([temperature for temperature, *_ in rows], dtype=torch.float64)
    top_k = torch.tensor([top_k for _, (top_k, _), *_ in rows])
    top_p = torch.tensor([top_p for _, (_, top_p), *_ in rows], dtype=torch.float64)
    seeds = torch.tensor([each for *_, each in rows])
    keys = sampling_keys(seeds, torch.zeros_like(seeds), torch.arange(len(rows)))
    token_ids, certain = narrow_draw(logits, temperature, top_k, top_p, keys, width=width)
    expected = sample(logits, temperature, top_k, top_p, keys)
    assert torch.equal(token_ids[certain], expected[certain])


def test_it_is_certain_of_what_is_common() -> None:
    """A draw that was never certain would pass the test above, and help nobody."""
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    ones = torch.ones(4, dtype=torch.float64)
    _, certain = narrow_draw(logits, ones, torch.tensor([0, 40, 0, 100]), ones * 0.9, torch.arange(4), width=WIDTHS[0])
    assert certain.tolist() == [True] * 4


def test_a_flat_row_is_left_to_the_twin() -> None:
    one = torch.ones(1, dtype=torch.float64)
    _, certain = narrow_draw(torch.zeros(1, 5_000), one, torch.tensor([0]), one * 0.9, torch.tensor([7]), width=256)
    assert certain.tolist() == [False]
