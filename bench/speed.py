"""A cluster on this machine's CPU against transformers: `make bench`.

Both compute greedy tokens from the same dequantised weights, in the same dtype, with the same number of threads, and in
turn, so that whatever else the machine does hits both: each limit is the median of the ratios of one round each. The
cluster is measured where its users are, at a client that streams from `paceline up`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

# OpenMP reads it when torch is loaded. Engines have it too: on shared cores, threads that spin for milliseconds, as is
# the default, would make transformers many times slower, and the ratios worth nothing.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch

from accept_parity import Reference
from cluster import Cluster
from paceline.checkpoint import resolve
from paceline.client.aio import AsyncClient
from paceline.config import UpConfig, load
from report import Report

THREADS: Final = 2
ROUNDS: Final = 5
BATCHES: Final = (1, 16)
COMPARED: Final = 24
"""Tokens of each request, at least, by both.

Prompts of a batch are computed one after the other, and what counts is when all decode: so ours go on until the last
has so many.
"""
LONGEST: Final = 1024
SHORT_PROMPT: Final = 64
LONG_PROMPT: Final = 1024
FASTER: Final = 1.3
LATER: Final = 1.15
IDS: Final = range(1_000, 40_000)
TIMEOUT_S: Final = 300.0

Prompts = list[list[int]]


@dataclass(frozen=True)
class Answer:
    """Tokens of each request, and when they came, in seconds after the requests were made."""

    tokens: list[list[int]]
    arrivals: list[list[float]]

    @property
    def first(self) -> float:
        """When the last of the first tokens came."""
        return max(times[0] for times in self.arrivals)

    @property
    def decode_rate(self) -> float:
        """Tokens per second from then on, until the first request ends: all requests decode together.

        Raises ValueError where that never was so.
        """
        began, ended = self.first, min(times[-1] for times in self.arrivals)
        if ended <= began:
            raise ValueError(f"the first of {len(self.arrivals)} requests ended before the last had begun")
        return sum(began < at <= ended for times in self.arrivals for at in times) / (ended - began)


@dataclass
class Series:
    """One quantity of both, round by round."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        """One round's."""
        self.ours.append(ours)
        self.theirs.append(theirs)

    @property
    def ratio(self) -> float:
        """The median of ours / theirs."""
        return statistics.median(one / other for one, other in zip(self.ours, self.theirs, strict=True))

    def shown(self, unit: str) -> str:
        """Both medians, and how far apart the ratios lay."""
        ratios = [one / other for one, other in zip(self.ours, self.theirs, strict=True)]
        return (
            f"{statistics.median(self.ours):.4g} against {statistics.median(self.theirs):.4g} {unit}, "
            f"ratios {min(ratios):.2f} to {max(ratios):.2f}"
        )


class Served:
    """A cluster behind its router, asked by one client."""

    def __init__(self, cluster: Cluster) -> None:
        self._address = cluster.router

    def answer(self, prompts: Prompts, wanted: int) -> Answer:
        """All prompts at once, each token as it comes, until each has `wanted`; then they are cancelled."""
        return asyncio.run(self._answer(prompts, wanted))

    async def _answer(self, prompts: Prompts, wanted: int) -> Answer:
        tokens: list[list[int]] = [[] for _ in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        async with AsyncClient(self._address) as client:
            await client.loads()  # the connection is there
            began = time.perf_counter()

            async def ask(index: int) -> None:
                stream = client.generate(
                    prompts[index],
                    max_tokens=wanted if len(prompts) == 1 else LONGEST,
                    temperature=0.0,
                    ignore_eos=True,
                    timeout=TIMEOUT_S,
                )
                async with stream:
                    async for chunk in stream:
                        tokens[index] += chunk.token_ids
                        arrivals[index] += [time.perf_counter() - began] * len(chunk.token_ids)
                        if all(len(each) >= wanted for each in tokens):
                            break

            await asyncio.gather(*map(ask, range(len(prompts))))
        return Answer(tokens, arrivals)


class Oracle:
    """transformers' own model, driven by the shortest loop there is: `generate` does more for each token."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = model.to(dtype)
        torch.set_num_threads(THREADS)

    @torch.inference_mode()
    def answer(self, prompts: Prompts, max_tokens: int) -> Answer:
        """All prompts, of one length, as one batch."""
        began = time.perf_counter()
        ids, past, steps, arrivals = torch.tensor(prompts), None, [], []
        for _ in range(max_tokens):
            done = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            ids, past = done.logits[:, -1].argmax(-1, keepdim=True), done.past_key_values
            steps.append(ids[:, 0].tolist())
            arrivals.append(time.perf_counter() - began)
        return Answer([list(tokens) for tokens in zip(*steps, strict=True)], [arrivals] * len(prompts))


def measure(report: Report, reference: Reference, dtype: str) -> None:
    """One dtype: decoding at each batch, a long prompt, and the first token with and without a prefill worker."""
    oracle = Oracle(reference.model, getattr(torch, dtype))
    flags = (f"--dtype={dtype}", f"--threads={THREADS}", "--no-prefix-cache")
    with Cluster(prefill=1, decode=1, flags=flags) as apart, Cluster(prefill=0, decode=1, flags=flags) as alone:
        rounds(report, Served(apart), Served(alone), oracle, dtype)


def rounds(report: Report, apart: Served, alone: Served, oracle: Oracle, dtype: str) -> None:
    """Everybody in turn."""
    source = random.Random(dtype)
    decoding, prefill, first = {batch: Series() for batch in BATCHES}, Series(), Series()
    differing: list[str] = []

    def draw(batch: int, length: int) -> Prompts:
        return [[source.choice(IDS) for _ in range(length)] for _ in range(batch)]

    def once(ask: Callable[[Prompts, int], Answer]) -> float:
        return ask(draw(1, LONG_PROMPT), 1).first

    for index in range(ROUNDS + 1):
        for batch in BATCHES:
            prompts = draw(batch, SHORT_PROMPT)
            ours, theirs = apart.answer(prompts, COMPARED), oracle.answer(prompts, COMPARED)
            if index:  # the first round warms all up
                decoding[batch].add(ours.decode_rate, theirs.decode_rate)
            differing += [
                f"round {index}, batch {batch}, request {request}"
                for request, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True))
                if one[:COMPARED] != other
            ]
        through, local, theirs_s = once(apart.answer), once(alone.answer), once(oracle.answer)
        if index:
            prefill.add(LONG_PROMPT / through, LONG_PROMPT / theirs_s)
            first.add(through * 1e3, local * 1e3)
    for batch, series in decoding.items():
        report.at_least(f"{dtype}: decode, batch {batch}", series.ratio, FASTER, "x transformers")
        report.note("", series.shown("tokens/s"))
    report.at_least(f"{dtype}: prompt of {LONG_PROMPT}, to its first token", prefill.ratio, 1.0, "x transformers")
    report.note("", prefill.shown("tokens/s"))
    report.at_most(f"{dtype}: first token, with against without prefill worker", first.ratio, LATER, "x")
    report.note("", first.shown("ms"))
    if dtype == "float32":
        report.equal(f"{dtype}: answers that differ from transformers'", differing, [])
    else:
        report.note(f"{dtype}: answers that differ from transformers', by rounding", len(differing))


def main() -> int:
    """Exit code."""
    report = Report("speed")
    with report:
        config = load(UpConfig, file=None, env=os.environ, flags={})
        source = resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
        report.note("threads of each engine and of transformers; cores", f"{THREADS}; {os.cpu_count()}")
        report.note("load average", " ".join(f"{load:.1f}" for load in os.getloadavg()))
        for dtype in sys.argv[1:] or ("float32", "bfloat16"):
            measure(report, Reference(source), dtype)
        report.note("load average at the end", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
