"""Sampling: the race of the torch twin in one pass over the logits, without a sort and without waiting for the host.

Each part of the vocabulary finds its likeliest token, and races its own tokens in float32, on a logarithmic scale. A
row's winner is the fastest of all parts unless another token came in so close behind it that float32 might have
confused the two, as happens once in some thousand draws: then the parts that are that close race again in float64, as
the twin does. Rows with top-k or top-p are left to `sampling_cut`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, launch, power_of_two
from paceline.kernels.sampling_cut import Limits, draw_limited
from paceline.kernels.sampling_noise import exponential_noise, log2_noise
from paceline.kernels.sampling_row import is_limited, peak_of_row

_PART = 2048  # vocabulary of a program
_TOKENS = 2048 if INTERPRETED else 1024  # looked at together
_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _steepness(heat: tl.tensor) -> tl.tensor:
    """log2(e) / temperature, finite in float32."""
    return tl.minimum(1.4426950408889634 / heat, 1e30).to(tl.float32)


@triton.jit
def _survey(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    times: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> None:
    """Of each part: its greatest logit (NaN if it has one), its fastest token (or likeliest, if greedy), and log2 of
    the best two times.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = row * tl.num_programs(1) + part
    heat = tl.load(temperature + row).to(tl.float64)
    begin = part * PART
    end = tl.minimum(begin + PART, vocab)
    lane = tl.arange(0, TOKENS)
    to_row = logits + row * stride
    peak = tl.full([TOKENS], float("-inf"), tl.float32)
    best_id = tl.full([TOKENS], _NEVER, tl.int32)
    if is_limited(top_k, top_p, row, vocab, BY_COUNT, BY_MASS) & (heat > 0.0):
        for first in range(begin, end, TOKENS):
            token = first + lane
            x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
    elif heat <= 0.0:
        best = tl.full([TOKENS], float("-inf"), tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + lane
            x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
            better = x > best  # never true of NaN
            best = tl.where(better, x, best)
            best_id = tl.where(better, token, best_id)
        likeliest = tl.max(best, axis=0)
        tl.store(ids + at, tl.min(tl.where(best == likeliest, best_id, _NEVER), axis=0))
    else:
        key = tl.load(keys + row)
        steepness = _steepness(heat)
        best = tl.full([TOKENS], float("inf"), tl.float32)
        second = tl.full([TOKENS], float("inf"), tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + lane
            x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
            time = log2_noise(key, token) - x * steepness
            second = tl.minimum(second, tl.maximum(time, best))
            better = time < best
            best = tl.where(better, time, best)
            best_id = tl.where(better, token, best_id)
        least = tl.min(best, axis=0)
        winner = tl.min(tl.where(best == least, best_id, _NEVER), axis=0)
        tl.store(times + at * 2, least)
        others = tl.where(best_id == winner, second, best)
        others = tl.where(others == others, others, float("inf"))  # NaN may get in here, interpreted
        tl.store(times + at * 2 + 1, tl.min(others, axis=0))
        tl.store(ids + at, winner)
    nan = peak != peak
    most = tl.max(tl.where(nan, float("-inf"), peak), axis=0)
    tl.store(peaks + at, tl.where(tl.max(nan.to(tl.int32), axis=0) > 0, float("nan"), most))


@triton.jit
def _race_again(
    to_row: tl.tensor,
    times: tl.tensor,
    bound: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    key: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """The winner in float64 among the parts of which some token is within `bound`."""
    lane = tl.arange(0, TOKENS)
    best = tl.full([TOKENS], float("inf"), tl.float64)
    best_id = tl.full([TOKENS], _NEVER, tl.int32)
    for part in range(PARTS):
        if tl.load(times + part * 2) <= bound:
            for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), TOKENS):
                token = first + lane
                x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float64)
                time = exponential_noise(key, token) / tl.exp((x - most.to(tl.float64)) / heat)
                better = time < best
                best = tl.where(better, time, best)
                best_id = tl.where(better, token, best_id)
    return tl.min(tl.where(best == tl.min(best, axis=0), best_id, _NEVER), axis=0)


@triton.jit
def _finish(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    times: tl.tensor,
    ids: tl.tensor,
    chosen: tl.tensor,
    bad: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    most, spoilt = peak_of_row(peaks, row, PARTS, PARTS_WIDE)
    tl.store(bad + row, spoilt)
    heat = tl.load(temperature + row).to(tl.float64)
    part = tl.arange(0, PARTS_WIDE)
    inside = part < PARTS
    at = row * PARTS + part
    if spoilt:
        tl.store(chosen + row, 0)
    elif heat <= 0.0:
        peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
        of_part = tl.load(ids + at, mask=inside, other=_NEVER)
        tl.store(chosen + row, tl.min(tl.where(peak == most, of_part, _NEVER), axis=0).to(tl.int64))
    elif not is_limited(top_k, top_p, row, vocab, BY_COUNT, BY_MASS):
        best = tl.load(times + at * 2, mask=inside, other=float("inf"))
        second = tl.load(times + at * 2 + 1, mask=inside, other=float("inf"))
        least = tl.min(best, axis=0)
        # Whatever wins has a weight of at least e^-41 of the likeliest token's, as noise is within 1e-16 and 37. So
        # log2 of its noise, and of its weight beside the peak's, is below 60, and float32's error of both in this:
        bound = least + (tl.abs(most) * _steepness(heat) + 100.0) * 9.5367431640625e-07
        close = (best <= bound).to(tl.int32) + (second <= bound).to(tl.int32)
        of_part = tl.load(ids + at, mask=inside, other=_NEVER)
        winner = tl.min(tl.where(best == least, of_part, _NEVER), axis=0)
        if tl.sum(close, axis=0) > 1:
            to_times = times + row * PARTS * 2
            winner = _race_again(
                logits + row * stride, to_times, bound, most, heat, tl.load(keys + row), vocab, PART, TOKENS, PARTS
            )
        tl.store(chosen + row, winner.to(tl.int64))


def sample_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """As its twin. Two kernels, and one more where `top_k` or `top_p` is given."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    device = logits.device
    parts = triton.cdiv(vocab, _PART)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=device)
    times = torch.empty((rows, parts, 2), dtype=torch.float32, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    limits = Limits(temperature, top_k, top_p)
    # What no row has is never read.
    columns = (temperature, temperature if top_k is None else top_k, temperature if top_p is None else top_p, keys)
    which = {"BY_COUNT": top_k is not None, "BY_MASS": top_p is not None}
    shape = {"PART": _PART, "TOKENS": _TOKENS, **which}
    stride = logits.stride(0)
    launch(_survey, (rows, parts), logits, *columns, peaks, times, ids, stride, vocab, **shape, num_warps=4)
    wide = {"PARTS": parts, "PARTS_WIDE": power_of_two(parts)}
    launch(
        _finish, (rows,), logits, *columns, peaks, times, ids, chosen, bad, stride, vocab, **shape, **wide, num_warps=4
    )
    if top_k is not None or top_p is not None:
        draw_limited(logits, limits, keys, peaks, chosen)
    return chosen, bad


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, keys: Tensor) -> Tensor:
    """As its twin."""
    return sample_rows(logits, temperature, top_k, top_p, keys)[0]
