"""Each architecture against transformers: log-probabilities and greedy tokens, however prompts are cut."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import Source, SourceKind, read_config, resolve
from paceline.checkpoint.kv_groups import KvGroups
from paceline.config import default_cache_dir
from paceline.engine.runner import Runner
from paceline.engine.weights import load
from paceline.testing.chunked import answers, blocks_needed, expected
from paceline.testing.random_models import ARCHITECTURES, SHAPES, VOCAB_SIZE, make, read_gguf, save
from paceline.testing.texts import varied_texts
from paceline.text import Tokenizer
from report import Report

CHUNKS = (1, 7, 512)
PROMPTS = 50
TINY_ANSWER = 8  # tokens
REAL_ANSWER = 4
LONGEST = 28  # tokens of a real model's prompt, but for one
LONG = 80  # tokens of that one, where the model has no windows
PAST_WINDOW = 8  # tokens by which it passes the longest window, where there are some
LIMIT = 1e-4  # of any log-probability's difference
REAL = ("smollm2-135m-instruct", "gemma3-270m")
PROSE = "The wind had turned by the time they reached the pass, and the riders closed up behind one another. "


def run(report: Report) -> None:
    """Tiny random models by the shape, then the real ones."""
    torch.manual_seed(0)
    for architecture in ARCHITECTURES:
        worst, wrong = 0.0, 0
        for number, shape in enumerate(SHAPES):
            with tempfile.TemporaryDirectory() as folder:
                oracle = make(architecture, shape, seed=number)
                save(oracle, Path(folder))
                source = Source(SourceKind.FOLDER, architecture, Path(folder))
                difference, differing = compare(oracle, source, random_prompts(), TINY_ANSWER)
            worst, wrong = max(worst, difference), wrong + differing
        judge(report, f"{architecture}, {len(SHAPES)} shapes", worst, wrong)
    for name in REAL:
        source = resolve(name, cache_dir=default_cache_dir(os.environ))
        oracle = read_gguf(source)
        judge(report, name, *compare(oracle, source, text_prompts(source), REAL_ANSWER))
        del oracle


def judge(report: Report, name: str, worst: float, wrong: int) -> None:
    """A model's two rows."""
    report.at_most(f"{name}: largest difference of a log-probability", worst, LIMIT)
    report.equal(f"{name}: greedy answers that differ, chunks of {', '.join(map(str, CHUNKS))}", wrong, 0)


def compare(oracle: Any, source: Source, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
    """The largest difference of a log-probability over all chunk sizes, and how many answers differ at some size."""
    config = read_config(source)
    weights = load(source, config, dtype=torch.float32, device="cpu")
    groups = len(KvGroups.of(config))
    runner = Runner(config, weights, num_blocks=blocks_needed(prompts, new_tokens=new_tokens, groups=groups))
    found = {chunk: answers(runner, prompts, chunk=chunk, new_tokens=new_tokens) for chunk in CHUNKS}
    worst, wrong = 0.0, 0
    for index, prompt in enumerate(prompts):
        first = found[CHUNKS[0]][index].token_ids
        logprobs = expected(oracle, prompt, first)
        greedy = logprobs.argmax(-1).tolist()
        wrong += any(found[chunk][index].token_ids != greedy for chunk in CHUNKS)
        for chunk in CHUNKS:
            if found[chunk][index].token_ids == first:
                # Not max(), which may drop a NaN.
                difference = float((torch.stack(found[chunk][index].logprobs) - logprobs).abs().max())
                worst = worst if difference <= worst else difference
    return worst, wrong


def random_prompts() -> list[list[int]]:
    """Of 1 to 120 tokens, and the longest longer than any window."""
    lengths = [1 + (7 * index) % 60 for index in range(PROMPTS - 1)] + [120]
    return [torch.randint(0, VOCAB_SIZE, (length,)).tolist() for length in lengths]


def text_prompts(source: Source) -> list[list[int]]:
    """Texts in many scripts, code and white space, and prose that is longer than the longest window."""
    tokenizer = Tokenizer.load(source)
    texts = [text for text in varied_texts(PROMPTS - 1 + 10) if tokenizer.encode(text)][: PROMPTS - 1]
    prompts = [list(tokenizer.encode(text))[:LONGEST] for text in texts]
    window = max((window for window in read_config(source).windows if window), default=0)
    return [*prompts, list(tokenizer.encode(PROSE * 40))[: window + PAST_WINDOW if window else LONG]]
