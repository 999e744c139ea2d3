"""Sampling: the noise to the bit, and the race against one run in Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline import kernels
from paceline.kernels import reference
from paceline.testing.nearness import cases

GOLDEN = 0x9E3779B97F4A7C15


def _mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _key(seed: int, choice: int, position: int) -> int:
    of_seed = _mixed((seed + GOLDEN) % 2**64)
    return _mixed((_mixed((of_seed + choice * GOLDEN) % 2**64) + position * GOLDEN) % 2**64)


def _u(key: int, token: int) -> float:
    return ((_mixed((key + (token + 1) * GOLDEN) % 2**64) >> 12) + 0.5) / 2**52


def _winner(logits: list[float], heat: float, top_k: int, top_p: float, key: int) -> int:
    """The token that a row draws, by sorting and a loop."""
    most = max(logits)
    if heat == 0:
        return logits.index(most)
    weights = [math.exp((x - most) / heat) for x in logits]
    ranked = sorted(weights, reverse=True)
    if 0 < top_k < len(ranked):
        ranked = ranked[:top_k]
    least, share = ranked[-1], 0.0
    if top_p < 1:
        for weight in ranked:
            share += weight
            if share >= top_p * math.fsum(ranked):
                least = weight
                break
    times = {token: -math.log1p(-_u(key, token)) / w for token, w in enumerate(weights) if w >= least and w > 0}
    return min(times, key=lambda token: (times[token], token))


def _logits(rows: int, vocab: int, spread: float, source: torch.Generator) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=source) * spread
    logits[:, vocab // 2 :: 7] = logits[:, :1].clone()  # equals, at whatever rank
    return logits


@cases(
    {
        "vocab": (1, 2, 100, 257, 5000),
        "spread": (0.0, 0.5, 4.0, 200.0),
        "heat": (0.0, 0.3, 1.0, 50.0),
        "top_k": (0, 1, 2, 40, 10**6),
        "top_p": (0.0, 0.05, 0.5, 0.93, 0.99999, 1.0),
    }
)
def test_a_draw_is_the_winner_of_the_race(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    vocab, spread, heat, top_k, top_p = case.values()
    source = torch.Generator().manual_seed(vocab)
    rows = 3
    logits = _logits(rows, vocab, spread, source)
    keys = [_key(2**63 + 11, 2, row) for row in range(rows)]

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    found = kernels.sample(
        logits.to(device),
        column(heat, torch.float64),
        column(top_k, torch.int64),
        column(top_p, torch.float64),
        torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys], device=device),
    )
    wanted = [_winner(row.tolist(), heat, top_k, top_p, key) for row, key in zip(logits, keys, strict=True)]
    assert found.tolist() == wanted


def test_rows_of_every_kind_share_a_batch(backend: kernels.Backend, device: torch.device) -> None:
    """Each row's draw is what it is alone."""
    heat = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.0, 2.0], dtype=torch.float64, device=device)
    top_k = torch.tensor([0, 0, 5, 0, 50, 3, 1], device=device)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.6, 0.5, 0.3], dtype=torch.float64, device=device)
    number = torch.arange(7, device=device)
    keys = kernels.sampling_keys(number, number, number)
    logits = _logits(7, 4500, 3.0, torch.Generator().manual_seed(5)).to(device)
    together = kernels.sample(logits, heat, top_k, top_p, keys)
    for row in range(7):
        one = slice(row, row + 1)
        assert kernels.sample(logits[one], heat[one], top_k[one], top_p[one], keys[one]) == together[row]


def test_of_equally_likely_tokens_greedy_takes_the_first(backend: kernels.Backend, device: torch.device) -> None:
    logits = torch.zeros(4, 9000, device=device)
    logits[1, [8999, 4096, 4095]] = 2.0
    logits[2, [7000, 5000]] = 1.0
    logits[3] = -torch.inf
    greedy, none = torch.zeros(4, dtype=torch.float64, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    assert kernels.sample(logits, greedy, none, greedy + 1, none).tolist() == [0, 4095, 5000, 0]


def test_negative_zero_is_zero(backend: kernels.Backend, device: torch.device) -> None:
    """A cut at zero keeps both."""
    logits = torch.tensor([[0.0, -0.0, -0.0, -3.0]], device=device).expand(24, 4).contiguous()
    ones, number = torch.ones(24, dtype=torch.float64, device=device), torch.arange(24, device=device)
    keys = kernels.sampling_keys(number, number, number)
    found = kernels.sample(logits, ones, torch.ones_like(number), ones, keys)
    assert set(found.tolist()) == {0, 1, 2}


def test_unusable_rows_are_named_and_their_neighbours_are_not(backend: kernels.Backend, device: torch.device) -> None:
    logits = torch.zeros(7, 5000, device=device)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, 4998] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf  # all but one token excluded
    logits[5, 4999] = torch.nan
    number = torch.arange(7, device=device)
    keys = kernels.sampling_keys(number, number, number)
    for heat in (0.0, 1.0):
        for top_k in (None, number + 20):
            column = torch.full((7,), heat, dtype=torch.float64, device=device)
            ids, bad = kernels.sample_rows(logits, column, top_k, None, keys)
            assert bad.tolist() == [True, True, True, True, False, True, False]
            assert ids[4] == 0
            assert bool(((ids >= 0) & (ids < 5000)).all())


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [(torch.float32, 0.01), (torch.bfloat16, 1.0), (torch.float32, 3.0), (torch.bfloat16, 3.0), (torch.float32, 12.0)],
)
def test_a_row_draws_what_the_twin_draws(
    dtype: torch.dtype, spread: float, triton_backend: None, device: torch.device
) -> None:
    """Peaked and flat rows, limits that few and that most tokens pass, columns of either width."""
    rows, vocab = (12, 2600) if device.type == "cpu" else (96, 50000)  # interpreted: what takes seconds
    source = torch.Generator().manual_seed(int(spread * 100))
    logits = (torch.randn(rows, vocab, generator=source) * spread + 20.0).to(dtype)
    number = torch.arange(rows)
    heat = torch.tensor([0.0, 0.3, 1.0, 1.7])[number * 4 // rows]
    top_k = torch.tensor([0, 1, 30, 300, 2000, 0])[number % 6].int()
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.95, 0.999999, 0.02, 1.0])[number % 7]
    keys = kernels.sampling_keys(number, number * 0, number)
    for limits in ((None, None), (top_k, None), (None, top_p), (top_k, top_p)):
        wanted, _ = reference.sample_rows(logits, heat, *limits, keys)
        there = [None if limit is None else limit.to(device) for limit in limits]
        found, bad = kernels.sample_rows(logits.to(device), heat.to(device), *there, keys.to(device))
        assert found.tolist() == wanted.tolist()
        assert not bad.any()


def test_a_close_race_is_run_again_in_float64(triton_backend: None, device: torch.device) -> None:
    """Of two tokens that float32 cannot tell apart, each wins where it is the faster one."""
    rows, vocab, pair = 64, 5000, torch.tensor([[17, 4321]])
    number = torch.arange(rows)
    keys = kernels.sampling_keys(number, number, number)
    noise = reference.exponential_noise(keys[:, None], pair)
    logits = torch.full((rows, vocab), -100.0)
    logits[:, 17] = 0.0
    logits[:, 4321] = (noise[:, 1] / noise[:, 0]).log().float()  # rounded: now one or the other is ahead by 1e-8 or so
    ones = torch.ones(rows, dtype=torch.float64)
    wanted, _ = reference.sample_rows(logits, ones, None, None, keys)
    assert set(wanted.tolist()) == {17, 4321}
    found, _ = kernels.sample_rows(logits.to(device), ones.to(device), None, None, keys.to(device))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("allowed", [1, 5, 700])
def test_what_is_excluded_counts_for_nothing(allowed: int, triton_backend: None, device: torch.device) -> None:
    """A grammar, say, leaves fewer tokens than top-k asks for."""
    rows, vocab = 8, 5000
    source = torch.Generator().manual_seed(allowed)
    logits = torch.full((rows, vocab), -torch.inf)
    places = torch.randperm(vocab, generator=source)[:allowed]
    logits[:, places] = torch.randn(rows, allowed, generator=source) * 4
    number = torch.arange(rows)
    keys = kernels.sampling_keys(number, number, number)
    ones = torch.ones(rows, dtype=torch.float64)
    for top_p in (None, ones * 0.8):
        wanted, _ = reference.sample_rows(logits, ones, number * 0 + 50, top_p, keys)
        limits = (number * 0 + 50).to(device), None if top_p is None else top_p.to(device)
        found, _ = kernels.sample_rows(logits.to(device), ones.to(device), *limits, keys.to(device))
        assert found.tolist() == wanted.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")
def test_a_graph_captures_it_and_follows_its_columns(triton_backend: None, device: torch.device) -> None:
    rows, vocab = 9, 5000
    number = torch.arange(rows, device=device)
    logits = torch.randn(rows, vocab, device=device)
    heat, top_k = torch.zeros(rows, dtype=torch.float64, device=device), torch.zeros_like(number)
    top_p, keys = torch.ones_like(heat), kernels.sampling_keys(number, number, number)
    kernels.sample_rows(logits, heat, top_k, top_p, keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, bad = kernels.sample_rows(logits, heat, top_k, top_p, keys)
    for step in range(3):
        logits.normal_()
        heat.fill_(step * 0.8)
        top_k.fill_(step * 7)
        top_p.fill_(1.0 - step * 0.2)
        graph.replay()
        assert torch.equal(ids, kernels.sample_rows(logits, heat, top_k, top_p, keys)[0])
        assert not bad.any()


def test_no_limits_need_no_search(triton_backend: None, device: torch.device) -> None:
    logits = _logits(3, 5000, 2.0, torch.Generator().manual_seed(9)).to(device)
    ones, number = torch.ones(3, dtype=torch.float64, device=device), torch.arange(3, device=device)
    keys = kernels.sampling_keys(number, number, number)
    unlimited, _ = kernels.sample_rows(logits, ones, None, None, keys)
    assert torch.equal(unlimited, kernels.sample(logits, ones, torch.zeros_like(number), ones, keys))


@pytest.mark.parametrize("first", [0, 2**17])
def test_the_noise_is_the_twins_to_the_bit(first: int, triton_backend: None, device: torch.device) -> None:
    """The uniform numbers are equal; their logarithm is within two units of the last place."""
    from paceline.testing.noise_kernel import noise_of

    keys = torch.tensor([0, -1, 2**62 + 12345, -(2**63)], device=device)
    tokens = torch.arange(first, first + 512, device=device)
    bits, noise = noise_of(keys, tokens)
    assert torch.equal(bits, reference.mix64(keys[:, None] + (tokens + 1) * reference.GOLDEN))
    expected = reference.exponential_noise(keys[:, None], tokens[None])
    assert bool(((noise - expected).abs() <= expected * 2.0**-51).all())
    u = [_u(int(keys[2]) % 2**64, int(token)) for token in tokens[:50]]
    assert [-math.log1p(-value) for value in u] == pytest.approx(noise[2, :50].tolist(), rel=1e-15)
