"""Where top-k and top-p cut a row's logits: a search by digits, which reads the row eight times and sorts nothing.

A logit becomes an unsigned 32-bit number of the same order, its key. At each level every part of the vocabulary takes
its tokens whose key begins as the cut's does, counts them by the key's next four bits, and adds up their weights; then
the cut's next digit is known. Sums are made in one order, whatever else is in the batch. Both searches find a value,
and all tokens that have it stay, as in the twin.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, launch, power_of_two

_LEVELS = 8  # of four bits
_TOKENS = 4096 if INTERPRETED else 128  # looked at together


@dataclass(frozen=True, slots=True)
class Race:
    """What a search works on: `logits` [rows, vocab], each part's `peaks` [rows, parts], `temperature` [rows]."""

    logits: Tensor
    peaks: Tensor
    temperature: Tensor


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """The key of a logit, int64 in [0, 2^32); of both zeros the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    signed = (key - 2147483648).to(tl.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _state(
    limits: tl.tensor,
    bases: tl.tensor,
    states: tl.tensor,
    bins: tl.tensor,
    row: tl.tensor,
    writes: tl.tensor,
    LEVEL: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(the cut's first LEVEL digits, tokens above all that begin so, their mass).

    `bins` [rows, PARTS, 2, 16] are the tallies of the level before. The program that `writes` leaves its state for the
    next level in `states` [rows, levels + 1, 4]: all others come to the same one.
    """
    if LEVEL == 0:
        return tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    else:  # noqa: RET505 - Triton compiles only the branch that it takes, and needs the other to be one
        part = tl.arange(0, PARTS_WIDE)
        digit = tl.arange(0, 16)
        at = bins + (row * PARTS + part)[:, None] * 32 + digit[None, :]
        counts = tl.sum(tl.load(at, mask=(part < PARTS)[:, None], other=0.0), axis=0)
        masses = tl.sum(tl.load(at + 16, mask=(part < PARTS)[:, None], other=0.0), axis=0)
        if LEVEL == 1:
            prefix = tl.full([], 0, tl.int64)
            count = tl.full([], 0.0, tl.float64)
            mass = tl.full([], 0.0, tl.float64)
            goal = tl.load(limits + row).to(tl.float64)
            if BY_MASS:
                base = tl.load(bases + row)
                goal = goal * tl.where(base < 0.0, tl.sum(masses, axis=0), base)
        else:
            state = states + (row * 16 + LEVEL - 1) * 4
            prefix = tl.load(state).to(tl.int64)
            count = tl.load(state + 1)
            mass = tl.load(state + 2)
            goal = tl.load(state + 3)
        driver = masses if BY_MASS else counts
        above_all = mass if BY_MASS else count
        from_digit = tl.where(digit[:, None] >= digit[None, :], driver[:, None], 0.0)
        reached = above_all + tl.sum(from_digit, axis=0)
        filled = driver > 0.0
        found = tl.max(tl.where(filled & (reached >= goal), digit, -1), axis=0)
        # Rounding can leave all of it short of the goal: then all of it stays.
        chosen = tl.where(found >= 0, found, tl.min(tl.where(filled, digit, 15), axis=0))
        prefix = prefix * 16 + chosen
        count += tl.sum(tl.where(digit > chosen, counts, 0.0), axis=0)
        mass += tl.sum(tl.where(digit > chosen, masses, 0.0), axis=0)
        state = states + (row * 16 + LEVEL) * 4
        tl.store(state, prefix.to(tl.float64), mask=writes)
        tl.store(state + 1, count, mask=writes)
        tl.store(state + 2, mass, mask=writes)
        tl.store(state + 3, goal, mask=writes)
        return prefix, count, mass


@triton.jit
def _cuts_nothing(limit: tl.tensor, vocab: tl.tensor, heat: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    if BY_MASS:
        return (heat <= 0.0) | (limit >= 1.0)
    else:  # noqa: RET505 - Triton compiles only the branch that it takes, and needs the other to be one
        return (heat <= 0.0) | (limit <= 0) | (limit >= vocab)


@triton.jit
def _tally(
    logits: tl.tensor,
    peaks: tl.tensor,
    temperature: tl.tensor,
    limits: tl.tensor,
    bases: tl.tensor,
    states: tl.tensor,
    before: tl.tensor,
    bins: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    LEVEL: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    if _cuts_nothing(tl.load(limits + row), vocab, heat, BY_MASS):
        return
    prefix, _, _ = _state(limits, bases, states, before, row, part == 0, LEVEL, PARTS, PARTS_WIDE, BY_MASS)
    every = tl.arange(0, PARTS_WIDE)
    most = tl.max(tl.load(peaks + row * PARTS + every, mask=every < PARTS, other=float("-inf")), axis=0)
    lane = tl.arange(0, TOKENS)
    digit = tl.arange(0, 16)
    # Tokens along the second axis: a thread then has one token and all digits, and no weight is computed twice.
    counts = tl.zeros([16, TOKENS], tl.float32)
    masses = tl.zeros([16, TOKENS], tl.float64)
    for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), TOKENS):
        token = first + lane
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = ordered(x)
        live = (token < vocab) & ((key >> (32 - 4 * LEVEL)) == prefix)
        if tl.max(live.to(tl.int32), axis=0) > 0:  # After a few levels hardly any are.
            hit = live[None, :] & (((key >> (28 - 4 * LEVEL)) & 15)[None, :] == digit[:, None])
            weight = tl.exp((x.to(tl.float64) - most.to(tl.float64)) / heat)
            masses += tl.where(hit, weight[None, :], 0.0)
            if not BY_MASS:
                counts += tl.where(hit, 1.0, 0.0)
    at = bins + (row * PARTS + part) * 32 + digit
    tl.store(at, tl.sum(counts, axis=1).to(tl.float64))
    tl.store(at + 16, tl.sum(masses, axis=1))


@triton.jit
def _settle(
    peaks: tl.tensor,
    temperature: tl.tensor,
    limits: tl.tensor,
    bases: tl.tensor,
    states: tl.tensor,
    before: tl.tensor,
    cuts: tl.tensor,
    vocab: tl.tensor,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    limit = tl.load(limits + row)
    if _cuts_nothing(limit, vocab, heat, BY_MASS):
        return
    cut, count, mass = _state(limits, bases, states, before, row, False, LEVELS, PARTS, PARTS_WIDE, BY_MASS)
    tl.store(cuts + row, tl.maximum(cut, tl.load(cuts + row)))
    if not BY_MASS:
        # What top-p takes its share of: the k likeliest, of equals at the cut as many as make up k.
        every = tl.arange(0, PARTS_WIDE)
        most = tl.max(tl.load(peaks + row * PARTS + every, mask=every < PARTS, other=float("-inf")), axis=0)
        weight = tl.exp((_logit(cut).to(tl.float64) - most.to(tl.float64)) / heat)
        tl.store(bases + row, mass + (limit.to(tl.float64) - count) * weight)


def find_cuts(race: Race, top_k: Tensor | None, top_p: Tensor | None, part: int) -> Tensor | None:
    """The least key that stays in, int64 [rows]; None if there is no limit to look for.

    Parts of the vocabulary are `part` tokens long. The twin says what the limits mean.
    """
    if top_k is None and top_p is None:
        return None
    rows, parts = race.peaks.shape
    device = race.logits.device
    cuts = torch.zeros(rows, dtype=torch.int64, device=device)
    bases = torch.full((rows,), -1.0, dtype=torch.float64, device=device)
    states = torch.empty((rows, 16, 4), dtype=torch.float64, device=device)
    bins = torch.empty((2, rows, parts, 2, 16), dtype=torch.float64, device=device)
    vocab = race.logits.shape[1]
    for limits, by_mass in ((top_k, False), (top_p, True)):
        if limits is None:
            continue
        known = {"PARTS": parts, "PARTS_WIDE": power_of_two(parts), "BY_MASS": by_mass, "num_warps": 4}
        for level in range(_LEVELS):
            launch(
                _tally,
                (rows, parts),
                race.logits,
                race.peaks,
                race.temperature,
                limits,
                bases,
                states,
                bins[(level + 1) % 2],
                bins[level % 2],
                race.logits.stride(0),
                vocab,
                LEVEL=level,
                PART=part,
                TOKENS=_TOKENS,
                **known,
            )
        launch(
            _settle,
            (rows,),
            race.peaks,
            race.temperature,
            limits,
            bases,
            states,
            bins[(_LEVELS - 1) % 2],
            cuts,
            vocab,
            LEVELS=_LEVELS,
            **known,
        )
    return cuts
