"""A seeded request's tokens, whatever happens around it: alone, among 16, after three preemptions, from the cache, in
other chunks, as one of several choices, and through a prefill and a decode process.

One engine in this process has the model that the cluster has, in float32. In it nothing of a request's tokens hangs on
the others: what differs between two runs is the last bits of logits, and a draw that such a bit decides is rare.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import torch

from cluster import Cluster
from paceline.checkpoint import read_config, resolve
from paceline.client import Client, Sampling
from paceline.config import UpConfig, load
from paceline.engine import weights
from paceline.engine.engine import Engine
from paceline.text import Tokenizer
from paceline.types import RequestId, SamplingParams
from report import Report

TOKENS = 56
PROMPT = "A paceline is a line of cyclists who ride close behind one another, so that each one rests in the wind of"
PREEMPTIONS = 3
POOL_BLOCKS = 256
ASKED: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0.0),
    "temperature 0.8, seed 42": Sampling(temperature=0.8, seed=42),
    "top_p 0.9, top_k 50, seed 7": Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7),
    "penalties, min_p, bias, seed 3": Sampling(
        temperature=1.25, min_p=0.0625, repetition_penalty=1.25, frequency_penalty=0.5, logit_bias={198: -2.0}, seed=3
    ),
}


class Lab:
    """Engines over one set of weights."""

    def __init__(self) -> None:
        settings = load(UpConfig, file=None, env=os.environ, flags={})
        source = resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline)
        self._config = read_config(source)
        self._weights = weights.load(
            source, self._config, dtype=torch.float32, device=torch.device("cpu"), seed=settings.seed
        )
        self._tokenizer = Tokenizer.load(source)

    def prompt(self, text: str) -> list[int]:
        """A text's tokens."""
        return self._tokenizer.encode(text)

    def engine(self, *, num_blocks: int = POOL_BLOCKS, token_budget: int = 512, prefix_cache: bool = False) -> Engine:
        """A fresh one."""
        return Engine(
            self._config,
            self._weights,
            num_blocks=num_blocks,
            token_budget=token_budget,
            prefix_cache=prefix_cache,
        )


def run(report: Report) -> None:
    """Each way of asking, in every situation."""
    torch.set_num_threads(1)
    lab = Lab()
    prompt = lab.prompt(PROMPT)
    alone: dict[str, list[int]] = {}
    for name, asked in ASKED.items():
        sampling = params(asked)
        alone[name] = ended(lab.engine(), {"a": (prompt, sampling)})["a"]
        report.equal(f"{name}: tokens", len(alone[name]), TOKENS)
        same(
            report,
            f"{name}: in chunks of 5",
            ended(lab.engine(token_budget=5), {"a": (prompt, sampling)})["a"],
            alone[name],
        )
        check_among_16(report, lab, name, prompt, sampling, alone[name])
        check_from_cache(report, lab, name, prompt, sampling, alone[name])
        check_preempted(report, lab, name, prompt, sampling, alone[name])
    differing = len({tuple(tokens) for tokens in alone.values()})
    report.equal("ways of asking that differ", differing, len(ASKED))
    with Cluster(prefill=1, decode=1, flags=("--dtype=float32", "--threads=1")) as cluster, cluster.client() as client:
        for name, asked in ASKED.items():
            check_apart(report, client, name, prompt, asked, alone[name])


def params(asked: Sampling) -> SamplingParams:
    """The engine's form of what a client asks."""
    fields = {**asked, "logit_bias": tuple((asked.get("logit_bias") or {}).items())}
    return msgspec.convert({**fields, "max_tokens": TOKENS, "ignore_eos": True}, SamplingParams)


def ended(
    engine: Engine, requests: Mapping[str, tuple[list[int], SamplingParams]], *, priority: int = 0
) -> dict[str, list[int]]:
    """Serves the requests together; each one's tokens."""
    for name, (prompt, sampling) in requests.items():
        assert started(engine, name, prompt, sampling, priority=priority)
    found: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for done in engine.step().progress:
            found[done.request_id] += done.token_ids
    return found


def started(engine: Engine, name: str, prompt: list[int], sampling: SamplingParams, *, priority: int = 0) -> bool:
    """False where the pool has no room for it now."""
    stored = len(prompt) + sampling.max_tokens - 1
    lease = engine.try_reserve(stored, upfront_tokens=len(prompt), prompt=prompt)
    if lease is None:
        return False
    engine.add(RequestId(name), prompt, sampling, lease=lease, priority=priority)
    return True


def same(report: Report, name: str, found: list[int], expected: list[int]) -> None:
    """Compares two answers; the table shows where they part."""
    parts_at = next((place for place, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if parts_at is None and len(found) != len(expected):
        parts_at = min(len(found), len(expected))
    report.equal(name, "the same" if parts_at is None else f"differ from token {parts_at} on", "the same")


def neighbour(number: int, prompt: list[int], *, max_tokens: int = TOKENS) -> tuple[list[int], SamplingParams]:
    """Another request, every second one seeded as the request itself is."""
    sampling = SamplingParams(
        temperature=0.9, seed=42 if number % 2 else number, max_tokens=max_tokens, ignore_eos=True
    )
    return prompt[number % 7 :] + prompt[: number % 5], sampling


def check_among_16(
    report: Report, lab: Lab, name: str, prompt: list[int], sampling: SamplingParams, expected: list[int]
) -> None:
    """F13: others in the batch, seeded or not."""
    others = {f"other {number}": neighbour(number, prompt, max_tokens=12) for number in range(15)}
    found = ended(lab.engine(), {**others, "a": (prompt, sampling)})
    same(report, f"{name}: among 16", found["a"], expected)


def check_from_cache(
    report: Report, lab: Lab, name: str, prompt: list[int], sampling: SamplingParams, expected: list[int]
) -> None:
    """The prompt's blocks are found, not computed."""
    engine = lab.engine(prefix_cache=True)
    short = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    ended(engine, {"first": (prompt, short)})
    computed = engine.stats.prompt_tokens_computed
    found = ended(engine, {"a": (prompt, sampling)})
    saved = len(prompt) - (engine.stats.prompt_tokens_computed - computed)
    report.at_least(f"{name}: prompt tokens from the cache", saved, 16)
    same(report, f"{name}: from the cache", found["a"], expected)


def check_preempted(
    report: Report, lab: Lab, name: str, prompt: list[int], sampling: SamplingParams, expected: list[int]
) -> None:
    """All other blocks are taken whenever it is about to want one, beside a request of a higher priority."""
    engine = lab.engine()
    other, others_sampling = neighbour(1, prompt, max_tokens=10 * TOKENS)
    lease = engine.try_reserve(len(other) + others_sampling.max_tokens)
    assert lease is not None
    engine.add(RequestId("other"), other, others_sampling, lease=lease, priority=1)
    assert started(engine, "a", prompt, sampling)
    found: list[int] = []
    preempted, taken = 0, engine.pool.lease(0)
    while len(found) < len(expected):
        output = engine.step()
        if output.preempted:
            preempted += 1
            taken.release()
            taken = engine.pool.lease(0)
        new = [token for done in output.progress if done.request_id == "a" for token in done.token_ids]
        found += new
        if new and preempted < PREEMPTIONS:
            taken.extend(engine.pool.free)
    report.at_least(f"{name}: preempted", preempted, PREEMPTIONS, "times")
    same(report, f"{name}: after preemptions", found, expected)


def check_apart(
    report: Report, client: Client, name: str, prompt: list[int], asked: Sampling, expected: list[int]
) -> None:
    """Through a prefill and a decode process: from the client, alone and as the first of two choices."""
    whole = Sampling(**{**asked, "max_tokens": TOKENS, "ignore_eos": True})
    for count in (1, 2):
        answer = client.complete(prompt, **Sampling(**{**whole, "n": count}))
        assert answer.finish.prefill_worker is not None
        first = answer.choices[0]
        same(report, f"{name}: apart, choice 1 of {count}", list(first.token_ids), expected)
