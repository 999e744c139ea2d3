"""Beam search, in float32: a prefill and a decode process joined by NIXL find what transformers finds, sequences and
scores; and how much of the pool the beams hold.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from accept_parity import Beams, Reference, check_apart, differing
from cluster import Cluster
from paceline.checkpoint import resolve
from paceline.client import Client, Completion
from paceline.config import UpConfig, load
from paceline.text import Tokenizer
from paceline.types import BLOCK_TOKENS, Role
from prompts import Case, cases
from report import Report

WIDTHS = (2, 4, 8)
PROMPTS = 20
LONGEST = 80  # tokens of a prompt: eight copies of it are what transformers computes
MAX_TOKENS = 16
TIMEOUT_S = 300.0
BACK_S = 30.0  # by when an answer's blocks must be free: a heart-beat says so within a second or two
SCORE_LIMIT = 1e-3
SHARED_PROMPT = 800  # tokens of the prompt whose blocks are counted
SHARED_WIDTH = 8
FLAGS = ("--dtype=float32", "--threads=1", "--transport=nixl", "--no-prefix-cache")


@dataclass(frozen=True)
class Asked:
    """One search."""

    prompt: list[int]
    width: int


def run(report: Report) -> None:
    """Asks all searches of a cluster and of transformers, compares, and counts blocks."""
    settings = load(UpConfig, file=None, env=os.environ, flags={})
    source = resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline)
    tokenizer = Tokenizer.load(source)
    reference = Reference(source)
    prompts = chosen(cases(tokenizer.encode), reference)
    report.equal("prompts", len(prompts), PROMPTS)
    searches = [Asked(prompt, width) for width in WIDTHS for prompt in prompts]
    with (
        ThreadPoolExecutor(1) as beside,
        Cluster(prefill=1, decode=1, flags=FLAGS) as cluster,
        cluster.client() as client,
    ):
        check_apart(report, client)
        expecting = beside.submit(lambda: [reference.search(each.prompt, each.width, MAX_TOKENS) for each in searches])
        found = [ask(client, each) for each in searches]
        compare(report, searches, found, expecting.result())
        prose = tokenizer.encode("The wind had turned by the time they reached the pass. " * SHARED_PROMPT)
        count_blocks(report, client, list(prose[:SHARED_PROMPT]))


def chosen(all_cases: list[Case], reference: Reference) -> list[list[int]]:
    """Some of every kind, as evenly as the short ones lie."""
    short = [prompt for case in all_cases if 1 < len(prompt := reference.encode(case.prompt)) <= LONGEST]
    return [short[index * len(short) // PROMPTS] for index in range(PROMPTS)]


def ask(client: Client, asked: Asked, max_tokens: int = MAX_TOKENS) -> Completion:
    """All beams of one search."""
    return client.complete(
        asked.prompt, max_tokens=max_tokens, n=asked.width, beam_width=asked.width, logprobs=0, timeout=TIMEOUT_S
    )


def compare(report: Report, searches: list[Asked], found: list[Completion], expected: list[Beams]) -> None:
    """Every sequence of every search, in order, and its score: the mean log-probability of its tokens."""
    for width in WIDTHS:
        of_width = [index for index, each in enumerate(searches) if each.width == width]
        ours = [[choice.token_ids for choice in found[index].choices] for index in of_width]
        theirs = [expected[index].sequences for index in of_width]
        report.equal(f"width {width}: searches whose sequences differ", differing(ours, theirs), [])
        worst = 0.0
        for index in of_width:
            for choice, score in zip(found[index].choices, expected[index].scores, strict=True):
                assert choice.cumulative_logprob is not None, "log-probabilities were asked for"
                difference = abs(choice.cumulative_logprob / len(choice.token_ids) - score)
                worst = worst if difference <= worst else difference  # not max(), which may drop a NaN
        report.at_most(f"width {width}: largest difference of a score", worst, SCORE_LIMIT)
    lengths = {len(choice.token_ids) for completion in found for choice in completion.choices}
    report.at_least("different lengths of answers", len(lengths), 3)
    landed = [completion.finish.transfer.blocks for completion in found]
    alone = [-(-len(each.prompt) // BLOCK_TOKENS) for each in searches]
    report.equal("searches that moved other blocks than one beam does", differing(landed, alone), [])


def count_blocks(report: Report, client: Client, prompt: list[int]) -> None:
    """The most blocks that are in use at once, of one beam and of many."""
    most = {width: most_used(client, Asked(prompt, width)) for width in (1, SHARED_WIDTH)}
    report.note("blocks of one beam, at most", most[1])
    report.at_most(f"blocks of {SHARED_WIDTH} beams, in times one's", most[SHARED_WIDTH] / most[1], 1.5)
    report.equal("blocks in use afterwards", used_blocks(client), 0)


def most_used(client: Client, asked: Asked) -> int:
    """Of the decode worker's pool, as its heart-beats tell."""
    with ThreadPoolExecutor(1) as beside:
        answer: Future[Completion] = beside.submit(ask, client, asked, 64)
        most = 0
        while not answer.done():
            most = max(most, used_blocks(client))
            time.sleep(0.05)
        answer.result()
    deadline = time.monotonic() + BACK_S
    while used_blocks(client) and time.monotonic() < deadline:
        time.sleep(0.05)
    return most


def used_blocks(client: Client) -> int:
    """Of the decode worker's pool."""
    [decode] = client.loads().of(Role.DECODE)
    return decode.load.total_blocks - decode.load.free_blocks
