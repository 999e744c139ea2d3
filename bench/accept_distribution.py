"""What is sampled against what each sampling parameter says, and their combinations: chi-square over 200,000 draws.

The expected distribution is computed here, one token after the other in plain Python, by the parameters' definitions.
Draws go through the engine's own sampler, each at a position of its own, as in one very long answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass

import torch

from paceline.engine.logits import Shaping
from paceline.engine.sampler import DrawPoint, sample
from paceline.types import SamplingParams
from report import Report

DRAWS = 200_000
P_VALUE = 0.001
ROWS = 50_000
"""Drawn in one batch."""
FEWEST = 5.0
"""Tokens that are expected less often share one cell, as the test's approximation wants."""
LOGITS = (2.1, 1.9, 1.4, 1.0, 0.7, 0.2, -0.1, -0.6, -1.0, -2.3, -3.5, -5.0)
EOS = (3,)
PROMPT = (0, 0, 5)
OUTPUT = (1, 1, 1, 5, 2)

NEUTRAL = SamplingParams()
ONE_BY_ONE = {
    "temperature 1": NEUTRAL,
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 2.5": SamplingParams(temperature=2.5),
    "top_k 4": SamplingParams(top_k=4),
    "top_p 0.8": SamplingParams(top_p=0.8),
    "min_p 0.2": SamplingParams(min_p=0.2),
    "repetition_penalty 1.4": SamplingParams(repetition_penalty=1.4),
    "presence_penalty 0.8": SamplingParams(presence_penalty=0.8),
    "frequency_penalty -0.4": SamplingParams(frequency_penalty=-0.4),
    "logit_bias": SamplingParams(logit_bias=((4, 1.5), (7, -2.0))),
    "logit_bias -100": SamplingParams(logit_bias=((0, -100.0),)),
    "min_tokens": SamplingParams(min_tokens=8, stop_token_ids=(1,)),
    "min_tokens, passed": SamplingParams(min_tokens=5, stop_token_ids=(1,)),
}
TOGETHER = {
    "toy of 8 words, T 0.7, top_p 0.9, one banned": SamplingParams(
        temperature=0.7, top_p=0.9, logit_bias=((1, -100.0),)
    ),
    "top_k 6, top_p 0.7": SamplingParams(top_k=6, top_p=0.7),
    "top_k 5, min_p 0.3, T 1.7": SamplingParams(top_k=5, min_p=0.3, temperature=1.7),
    "top_p 0.9, min_p 0.05": SamplingParams(top_p=0.9, min_p=0.05),
    "all penalties": SamplingParams(repetition_penalty=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    "penalties, bias, ban": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.6, logit_bias=((1, 2.0), (2, -100.0)), temperature=1.4
    ),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=8,
        top_p=0.92,
        min_p=0.04,
        repetition_penalty=1.2,
        presence_penalty=-0.3,
        frequency_penalty=0.25,
        logit_bias=((6, 1.0), (0, -100.0)),
        min_tokens=9,
    ),
}


@dataclass(frozen=True)
class Fit:
    """How well draws fit: the test's p-value, and draws of tokens that cannot be."""

    p_value: float
    impossible: int


def run(report: Report) -> None:
    """Every parameter alone, then together."""
    began = time.monotonic()
    for name, sampling in (ONE_BY_ONE | TOGETHER).items():
        words = 8 if name.startswith("toy") else len(LOGITS)
        for choice, wide in ((0, words), (1, 400)) if sampling in (NEUTRAL, TOGETHER["everything"]) else ((0, words),):
            # Far less likely tokens behind the words make the vocabulary one that a narrow look does not hold.
            logits = LOGITS[:words] + (-9.0,) * (wide - words)
            label = name if choice == 0 else f"{name}, vocabulary of {wide}, choice {choice}"
            fit = fitted(draws(logits, sampling, choice), expected(logits, sampling))
            report.at_least(f"{label}: p", fit.p_value, P_VALUE)
            report.equal(f"{label}: impossible tokens", fit.impossible, 0)
    wrong = fitted(draws(LOGITS, NEUTRAL, 0), expected(LOGITS, SamplingParams(temperature=1.02)))
    report.at_most("a temperature wrong by 2%: p", wrong.p_value, P_VALUE)
    report.note("seconds", time.monotonic() - began, "s")


def expected(logits: tuple[float, ...], sampling: SamplingParams) -> list[float]:
    """Each token's probability."""
    values = list(logits)
    for token in range(len(values)):
        if token in PROMPT + OUTPUT:
            penalty = sampling.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        times = OUTPUT.count(token)
        values[token] -= sampling.frequency_penalty * times + (sampling.presence_penalty if times else 0.0)
        values[token] += dict(sampling.logit_bias).get(token, 0.0)
    excluded = {token for token, bias in sampling.logit_bias if bias == -100.0}
    if len(OUTPUT) < sampling.min_tokens:
        excluded |= {*sampling.stop_token_ids, *EOS}
    weights = [
        0.0 if token in excluded else math.exp(value / sampling.temperature) for token, value in enumerate(values)
    ]
    weights = [weight if weight >= sampling.min_p * max(weights) else 0.0 for weight in weights]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = ranked[: sampling.top_k or None]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass >= sampling.top_p * total and sampling.top_p < 1.0:
            break
        nucleus.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(weights))]


def draws(logits: tuple[float, ...], sampling: SamplingParams, choice: int) -> Counter[int]:
    """How often the sampler took each token."""
    shaping = Shaping.of(sampling, PROMPT, EOS)
    if shaping is not None:
        shaping.catch_up([*PROMPT, *OUTPUT])
    row = torch.tensor([logits])
    found: Counter[int] = Counter()
    for first in range(0, DRAWS, ROWS):
        points = [DrawPoint(sampling, position, choice, shaping) for position in range(first, first + ROWS)]
        sampled = sample(row.expand(ROWS, -1), points)
        assert not sampled.bad
        found.update(sampled.token_ids)
    return found


def fitted(found: Counter[int], probabilities: list[float]) -> Fit:
    """Pearson's chi-square of `found` against `probabilities`."""
    impossible = sum(times for token, times in found.items() if probabilities[token] == 0.0)
    cells = [(found[token], p * DRAWS) for token, p in enumerate(probabilities) if p * DRAWS >= FEWEST]
    rare = [(found[token], p * DRAWS) for token, p in enumerate(probabilities) if 0.0 < p * DRAWS < FEWEST]
    if rare and sum(wanted for _, wanted in rare) >= FEWEST:
        cells.append((sum(times for times, _ in rare), sum(wanted for _, wanted in rare)))
    statistic = sum((times - wanted) ** 2 / wanted for times, wanted in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()
    return Fit(p_value, impossible)
