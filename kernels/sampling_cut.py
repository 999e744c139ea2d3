"""Draws of rows with top-k or top-p: one program a row, which gathers its likeliest tokens and decides among those.

It looks for a logit below which no token can stay, with not too many above it: at first that of some part's peak for
top-k, and a distance from the row's peak for top-p. The tokens above are gathered, in the order of the vocabulary.
Among them the cut is found by bisection, of counts or of sums in float64. What top-p takes its share of is the mass of
the whole row: that of the tokens that were not gathered is summed in float32, and where its rounding could matter,
again in float64. A row too flat for that is left to `sampling_flat`. Sums are made in one order, whatever else is in
the batch. Both searches find a value, and all tokens that have it stay, as in the twin.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, launch, power_of_two
from paceline.kernels.sampling_flat import draw_flat
from paceline.kernels.sampling_noise import exponential_noise
from paceline.kernels.sampling_row import is_limited, ordered, peak_of_row, unordered, weigh

_MOST = 1024 if INTERPRETED else 4096  # tokens gathered
_TOKENS = 2048 if INTERPRETED else 4096  # looked at together
_DIGIT_TOKENS = 2048 if INTERPRETED else 512  # looked at together by digits
_TRIES = tl.constexpr(6)
_NOTHING = tl.constexpr(104.0)  # e^-104 is 0 in float32
_NEVER = tl.constexpr(2**31 - 1)
_ROUNDING = tl.constexpr(8e-6)  # of a float32 weight, relative: its exponent's rounding, and its exponential's


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row's draw is limited by, each [rows]; None: no row has such a limit."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None


@triton.jit
def _greatest(keys: tl.tensor, weights: tl.tensor, goal: tl.tensor) -> tl.tensor:
    """The greatest key such that the weights of keys as great come to the goal; the least if all do not."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), axis=0) >= goal:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _gather(
    to_row: tl.tensor,
    to_x: tl.tensor,
    to_ids: tl.tensor,
    floor: tl.tensor,
    most: tl.tensor,
    steepness: tl.tensor,
    vocab: tl.tensor,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Writes out the tokens from `floor` up, at most MOST, and returns (their number, their mass, the others' mass)."""
    lane = tl.arange(0, TOKENS)
    above = tl.zeros([TOKENS], tl.float32)
    below = tl.zeros([TOKENS], tl.float32)
    found = 0
    for first in range(0, vocab, TOKENS):
        token = first + lane
        x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - most) * steepness)
        taken = x >= floor
        below += tl.where(taken, 0.0, weight)
        if tl.max(taken.to(tl.int32), axis=0) > 0:
            above += tl.where(taken, weight, 0.0)
            place = found + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            fits = taken & (place < MOST)
            tl.store(to_x + place, x, mask=fits)
            tl.store(to_ids + place, token, mask=fits)
            found += tl.sum(taken.to(tl.int32), axis=0)
    return found, tl.sum(above, axis=0), tl.sum(below, axis=0)


@triton.jit
def _mass_below(
    to_row: tl.tensor,
    floor: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    vocab: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The mass of the tokens below `floor`, in float64."""
    lane = tl.arange(0, TOKENS)
    mass = tl.zeros([TOKENS], tl.float64)
    for first in range(0, vocab, TOKENS):
        token = first + lane
        x = tl.load(to_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.where(x < floor, weigh(x, most, heat), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _gather_enough(
    to_row: tl.tensor,
    to_x: tl.tensor,
    to_ids: tl.tensor,
    distance: tl.tensor,
    number: tl.tensor,
    share: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    vocab: tl.tensor,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Gathers from about `distance` below the peak up: (how many, or 0 if there is no telling; from where; the mass of
    the others). Brackets close in until there are enough tokens, and not too many.
    """
    steepness = tl.minimum(1.4426950408889634 / heat, 1e30).to(tl.float32)
    farthest = tl.minimum(heat * _NOTHING, 1e30).to(tl.float32)
    near = tl.full([], 0.0, tl.float32)
    far = tl.full([], float("inf"), tl.float32)
    rest = tl.full([], 0.0, tl.float32)
    floor = most
    tries = 0
    found = 0
    settled = 0
    while (tries < _TRIES) & (settled == 0):
        tries += 1
        distance = tl.minimum(distance, farthest)
        floor = most - distance
        found, mass, rest = _gather(to_row, to_x, to_ids, floor, most, steepness, vocab, MOST, TOKENS)
        by_number = (number > 0) & (found >= number)
        # With room for rounding; the sums that decide are exact ones.
        by_mass = (number == 0) & (mass * 0.99999 >= share.to(tl.float32) * (mass + rest))
        enough = by_number | by_mass | (rest == 0.0)
        settled = (enough & (found <= MOST)).to(tl.int32)
        near = tl.where(found > MOST, near, distance)
        far = tl.where(found > MOST, distance, far)
        distance = tl.where(far == float("inf"), distance * 1.5 + 1e-30, (near + far) * 0.5)
    return tl.where(settled > 0, found, 0), floor, rest


@triton.jit
def _draw_gathered(
    to_row: tl.tensor,
    to_x: tl.tensor,
    to_ids: tl.tensor,
    found: tl.tensor,
    floor: tl.tensor,
    rest: tl.tensor,
    number: tl.tensor,
    share: tl.tensor,
    most: tl.tensor,
    heat: tl.tensor,
    key: tl.tensor,
    vocab: tl.tensor,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The draw among the gathered tokens."""
    place = tl.arange(0, MOST)
    real = place < found
    x = tl.load(to_x + place, mask=real, other=float("-inf"))
    ids = tl.load(to_ids + place, mask=real, other=_NEVER)
    # What pads is as likely as the likeliest, and weighs nothing: it moves neither end of a search.
    order = tl.where(real, ordered(x), ordered(most))
    weight = tl.where(real, weigh(x, most, heat), 0.0)
    cut = tl.min(order, axis=0)
    total = tl.sum(weight, axis=0)
    error = tl.full([], 0.0, tl.float64)
    if number > 0:
        one = tl.where(real, 1.0, 0.0)
        cut = _greatest(order, one, number.to(tl.float32))
        above = order > cut
        left = number.to(tl.float32) - tl.sum(tl.where(above, one, 0.0), axis=0)
        # Of equals at the cut as many as make up the number; where fewer weigh anything, all of those.
        left = tl.minimum(left, tl.sum(tl.where(order == cut, one, 0.0), axis=0)).to(tl.float64)
        total = tl.sum(tl.where(above, weight, 0.0), axis=0) + left * weigh(unordered(cut), most, heat)
    else:
        total += rest.to(tl.float64)
        error = rest.to(tl.float64) * _ROUNDING
    if share < 1.0:
        by_mass = _greatest(order, weight, share * total)
        with_it = tl.sum(tl.where(order >= by_mass, weight, 0.0), axis=0)
        without = tl.sum(tl.where(order > by_mass, weight, 0.0), axis=0)
        doubtful = (with_it < share * (total + error)) | (without >= share * (total - error))
        if doubtful & (error > 0.0):
            total = tl.sum(weight, axis=0) + _mass_below(to_row, floor, most, heat, vocab, TOKENS)
            by_mass = _greatest(order, weight, share * total)
        cut = tl.maximum(cut, by_mass)
    time = tl.where(real & (order >= cut), exponential_noise(key, ids) / weight, float("inf"))
    return tl.min(tl.where(time == tl.min(time, axis=0), ids, _NEVER), axis=0)


@triton.jit
def _limited(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    gathered: tl.tensor,
    gathered_ids: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
    DIGIT_TOKENS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float64)
    most, spoilt = peak_of_row(peaks, row, PARTS, PARTS_WIDE)
    if (heat <= 0.0) | spoilt:
        return
    if not is_limited(top_k, top_p, row, vocab, BY_COUNT, BY_MASS):
        return
    number = tl.full([], 0, tl.int32)  # 0: no limit
    share = tl.full([], 1.0, tl.float64)
    if BY_COUNT:
        limit = tl.load(top_k + row).to(tl.int64)
        number = tl.where(limit < vocab, tl.maximum(limit, 0), 0).to(tl.int32)
    if BY_MASS:
        share = tl.load(top_p + row).to(tl.float64)
    distance = tl.minimum(heat * 9.0, 1e30).to(tl.float32)
    if number > 0:
        part = tl.arange(0, PARTS_WIDE)
        peak = tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
        # Each part's peak is a token: so many tokens are at least as likely as the last of that many peaks.
        wanted = tl.minimum(number, PARTS).to(tl.float32)
        distance = most - unordered(_greatest(ordered(peak), tl.full([PARTS_WIDE], 1.0, tl.float32), wanted))
    to_row = logits + row * stride
    to_x = gathered + row * MOST
    to_ids = gathered_ids + row * MOST
    key = tl.load(keys + row)
    found, floor, rest = _gather_enough(to_row, to_x, to_ids, distance, number, share, most, heat, vocab, MOST, TOKENS)
    if found > 0:
        tl.debug_barrier()  # What other threads gathered is read.
        token = _draw_gathered(
            to_row, to_x, to_ids, found, floor, rest, number, share, most, heat, key, vocab, MOST, TOKENS
        )
        tl.store(chosen + row, token.to(tl.int64))
    else:
        token = draw_flat(to_row, number, share, most, heat, key, vocab, TOKENS, DIGIT_TOKENS)
        tl.store(chosen + row, token.to(tl.int64))


def draw_limited(logits: Tensor, limits: Limits, keys: Tensor, peaks: Tensor, chosen: Tensor) -> None:
    """Writes the draws of rows that top-k or top-p limits into `chosen` [rows]; others are left as they are.

    `peaks` [rows, parts] are the greatest logits of each part of the vocabulary.
    """
    rows, vocab = logits.shape
    parts = peaks.shape[1]
    gathered = torch.empty((rows, _MOST), dtype=torch.float32, device=logits.device)
    gathered_ids = torch.empty((rows, _MOST), dtype=torch.int32, device=logits.device)
    launch(
        _limited,
        (rows,),
        logits,
        limits.temperature,
        limits.temperature if limits.top_k is None else limits.top_k,
        limits.temperature if limits.top_p is None else limits.top_p,
        keys,
        peaks,
        gathered,
        gathered_ids,
        chosen,
        logits.stride(0),
        vocab,
        PARTS=parts,
        PARTS_WIDE=power_of_two(parts),
        MOST=_MOST,
        TOKENS=_TOKENS,
        DIGIT_TOKENS=_DIGIT_TOKENS,
        BY_COUNT=limits.top_k is not None,
        BY_MASS=limits.top_p is not None,
        num_warps=16,
    )
