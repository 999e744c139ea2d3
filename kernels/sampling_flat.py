"""Draws of rows too flat to gather their likeliest tokens: the cut is found by digits, in eight passes over the row."""

import triton
import triton.language as tl

from paceline.kernels.sampling_noise import exponential_noise
from paceline.kernels.sampling_row import ordered, unordered, weigh

_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _cut_by_digits(
    to_row: tl.tensor,
    goal: tl.tensor,
    base: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    vocab: tl.tensor,
    BY_MASS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(the cut's key, the mass of `goal` tokens) over the whole row, four bits of the key a pass.

    By mass, the goal is a share of `base`, or of the whole row if that is negative.
    """
    lane = tl.arange(0, TOKENS)
    digit = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.int64)
    count = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    for level in range(8):
        counts = tl.zeros([16, TOKENS], tl.float32)
        masses = tl.zeros([16, TOKENS], tl.float64)
        for first in range(0, vocab, TOKENS):
            token = first + lane
            x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            key = ordered(x).to(tl.int64) + 2147483648
            live = (token < vocab) & ((key >> (32 - 4 * level)) == prefix)
            if tl.max(live.to(tl.int32), axis=0) > 0:  # After a few levels hardly any are.
                hit = live[None, :] & (((key >> (28 - 4 * level)) & 15)[None, :] == digit[:, None])
                masses += tl.where(hit, weigh(x, most, heat)[None, :], 0.0)
                counts += tl.where(hit, 1.0, 0.0)
        count_of = tl.sum(counts, axis=1).to(tl.float64)
        mass_of = tl.sum(masses, axis=1)
        if BY_MASS:
            if level == 0:
                goal = goal * tl.where(base < 0.0, tl.sum(mass_of, axis=0), base)
            driver = mass_of
            reached = mass
        else:
            driver = count_of
            reached = count
        from_digit = tl.where(digit[:, None] >= digit[None, :], driver[:, None], 0.0)
        enough = (driver > 0.0) & (reached + tl.sum(from_digit, axis=0) >= goal)
        last = tl.max(tl.where(enough, digit, -1), axis=0)
        # Rounding can leave all of it short of the goal: then all of it stays.
        last = tl.where(last >= 0, last, tl.min(tl.where(count_of > 0.0, digit, 15), axis=0))
        prefix = prefix * 16 + last
        count += tl.sum(tl.where(digit > last, count_of, 0.0), axis=0)
        mass += tl.sum(tl.where(digit > last, mass_of, 0.0), axis=0)
    cut = (prefix - 2147483648).to(tl.int32)
    # Of equals at the cut as many as make up the number.
    return cut, mass + (goal - count) * weigh(unordered(cut), most, heat)


@triton.jit
def _race_row(
    to_row: tl.tensor,
    cut: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    key: tl.tensor,
    vocab: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The winner among all of a row's tokens from the cut up."""
    lane = tl.arange(0, TOKENS)
    best = tl.full([TOKENS], float("inf"), tl.float64)
    best_id = tl.full([TOKENS], _NEVER, tl.int32)
    for first in range(0, vocab, TOKENS):
        token = first + lane
        x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        runs = (token < vocab) & (ordered(x) >= cut)
        if tl.max(runs.to(tl.int32), axis=0) > 0:
            time = exponential_noise(key, token) / weigh(x, most, heat)
            better = runs & (time < best)
            best = tl.where(better, time, best)
            best_id = tl.where(better, token, best_id)
    return tl.min(tl.where(best == tl.min(best, axis=0), best_id, _NEVER), axis=0)


@triton.jit
def draw_flat(
    to_row: tl.tensor,
    number: tl.tensor,
    share: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    key: tl.tensor,
    vocab: tl.tensor,
    TOKENS: tl.constexpr,
    DIGIT_TOKENS: tl.constexpr,
) -> tl.tensor:
    """The draw among the `number` likeliest tokens (0: all), and of those `share` of their mass."""
    cut = tl.full([], -2147483648, tl.int32)
    base = tl.full([], -1.0, tl.float64)
    if number > 0:
        cut, base = _cut_by_digits(to_row, number.to(tl.float64), base, most, heat, vocab, False, DIGIT_TOKENS)
    if share < 1.0:
        by_mass, _ = _cut_by_digits(to_row, share, base, most, heat, vocab, True, DIGIT_TOKENS)
        cut = tl.maximum(cut, by_mass)
    return _race_row(to_row, cut, most, heat, key, vocab, TOKENS)
