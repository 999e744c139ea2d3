"""Sampling: the race of the torch twin, over parts of the vocabulary, without a sort and without waiting for the host.

A row's likeliest token is found first (greedy rows need no more). Rows with top-k or top-p then look for the logit at
which they cut, in `sampling_cut`. Last, each part of the vocabulary races its own tokens, and a row's fastest wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import INTERPRETED, launch, power_of_two
from paceline.kernels.sampling_cut import Race, find_cuts, ordered

_PART = 4096  # vocabulary of a program
_TOKENS = 4096 if INTERPRETED else 512  # looked at together
_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _mix64(z: tl.tensor) -> tl.tensor:
    """The twin's `mix64`, bit for bit; shifts of signed numbers copy the sign, hence the masks."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def random_bits(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """64 random bits of a row's generator for a token, int64."""
    return _mix64(key + (token.to(tl.int64) + 1) * -7046029254386353131)


@triton.jit
def exponential_noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The twin's `exponential_noise`: the same u, of which 1 - u is exact too, so that no log1p is needed."""
    bits = (random_bits(key, token) >> 12) & 0xFFFFFFFFFFFFF
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(1.0 - u)


@triton.jit
def _peaks(
    logits: tl.tensor,
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, TOKENS)
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    best_id = tl.minimum(part * PART + lane, vocab - 1)
    for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), TOKENS):
        token = first + lane
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        better = x > best  # never true of NaN
        best = tl.where(better, x, best)
        best_id = tl.where(better, token, best_id)
    most = tl.max(best, axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, most)
    tl.store(peak_ids + at, tl.min(tl.where(best == most, best_id, _NEVER), axis=0))


@triton.jit
def _race(
    logits: tl.tensor,
    peaks: tl.tensor,
    cuts: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    times: tl.tensor,
    time_ids: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    CUT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat <= 0.0:
        return
    every = tl.arange(0, PARTS_WIDE)
    most = tl.max(tl.load(peaks + row * PARTS + every, mask=every < PARTS, other=float("-inf")), axis=0)
    key = tl.load(keys + row)
    lane = tl.arange(0, TOKENS)
    best = tl.full([TOKENS], float("inf"), tl.float64)
    best_id = tl.minimum(part * PART + lane, vocab - 1)
    for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), TOKENS):
        token = first + lane
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        time = exponential_noise(key, token) / tl.exp((x.to(tl.float64) - most.to(tl.float64)) / heat)
        runs = token < vocab
        if CUT:
            runs = runs & (ordered(x) >= tl.load(cuts + row))
        better = runs & (time < best)
        best = tl.where(better, time, best)
        best_id = tl.where(better, token, best_id)
    least = tl.min(best, axis=0)
    at = row * PARTS + part
    tl.store(times + at, least)
    tl.store(time_ids + at, tl.min(tl.where(best == least, best_id, _NEVER), axis=0))


@triton.jit
def _winner(
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    temperature: tl.tensor,
    times: tl.tensor,
    time_ids: tl.tensor,
    out: tl.tensor,
    PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_WIDE)
    inside = part < PARTS
    at = row * PARTS + part
    if tl.load(temperature + row) <= 0.0:
        peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
        ids = tl.load(peak_ids + at, mask=inside, other=_NEVER)
        tl.store(out + row, tl.min(tl.where(peak == tl.max(peak, axis=0), ids, _NEVER), axis=0).to(tl.int64))
    else:
        time = tl.load(times + at, mask=inside, other=float("inf"))
        ids = tl.load(time_ids + at, mask=inside, other=_NEVER)
        tl.store(out + row, tl.min(tl.where(time == tl.min(time, axis=0), ids, _NEVER), axis=0).to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, keys: Tensor) -> Tensor:
    """As its twin. None for `top_k` or `top_p` says that no row has such a limit, which saves looking for the cuts."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    times = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    time_ids = torch.empty_like(peak_ids)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    grid = (rows, parts)
    launch(_peaks, grid, logits, peaks, peak_ids, logits.stride(0), vocab, PART=_PART, TOKENS=_TOKENS, num_warps=4)
    cuts = find_cuts(Race(logits, peaks, temperature), top_k, top_p, _PART)
    wide = power_of_two(parts)
    launch(
        _race,
        grid,
        logits,
        peaks,
        peaks if cuts is None else cuts,
        temperature,
        keys,
        times,
        time_ids,
        logits.stride(0),
        vocab,
        PART=_PART,
        TOKENS=_TOKENS,
        PARTS=parts,
        PARTS_WIDE=wide,
        CUT=cuts is not None,
        num_warps=4,
    )
    launch(
        _winner,
        (rows,),
        peaks,
        peak_ids,
        temperature,
        times,
        time_ids,
        out,
        PARTS=parts,
        PARTS_WIDE=wide,
        num_warps=1,
    )
    return out
