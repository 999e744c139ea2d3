"""The prefix cache: right against a dictionary, in runs after churn, worth it in chats, and few slots left empty."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cluster import Cluster
from paceline.checkpoint import resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.client import Client, Completion
from paceline.engine.block_pool import BlockLease, BlockPool
from paceline.engine.engine import Engine
from paceline.engine.weights import load
from paceline.kvtransfer.transfer import merge
from paceline.prefix import block_hashes
from paceline.testing.cache_model import CacheModel
from paceline.types import BLOCK_TOKENS, RequestId, SamplingParams, blocks_for
from report import Report

OPERATIONS = 10_000
CHURN = 100_000
POOL_BLOCKS = 512
DESCRIPTORS = 3.0
TURNS, USERS = 8, 16
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 24, 24
LOAD_REQUESTS = 150
TINY = SHAPES["tiny"]


def run(report: Report) -> None:
    """The model, the churn, the chats with and without the cache, and the mixed load."""
    against_a_dictionary(report)
    after_churn(report)
    chats(report)
    mixed_load(report)


def against_a_dictionary(report: Report) -> None:
    """Random operations; each hit is compared with what the block holds, and with a dictionary of what is there."""
    for blocks in (32, 100, 400):
        model = CacheModel(blocks, seed=blocks)
        done = 0
        for _ in range(OPERATIONS):
            model.step()
            done += 1
        model.drain()
        report.equal(f"operations as the dictionary has them, pool of {blocks}", done, OPERATIONS)
        report.at_least("  blocks found", model.hits, 1)
        report.at_least("  blocks evicted", model.evicted, 1)


class Side:
    """One tier's pool under churn. `keeps` is how many requests it has in hand."""

    def __init__(self, keeps: int) -> None:
        self.pool = BlockPool(POOL_BLOCKS)
        self._live: list[BlockLease] = []
        self._keeps = keeps

    def serve(self, tokens: list[int], chance: random.Random) -> tuple[int, list[int]]:
        """Blocks that were found, and all of the prompt's; others leave, at random, while it has too many."""
        hashes = block_hashes(tokens)
        count = blocks_for(len(tokens))
        while True:
            found = self.pool.cache.find(hashes[: (len(tokens) - 1) // BLOCK_TOKENS])
            if len(self._live) < self._keeps and self.pool.cost(count - len(found), found) <= self.pool.free:
                break
            self._live.pop(chance.randrange(len(self._live))).release()
        lease = self.pool.lease(count - len(found), prefix=found)
        start = len(found)
        self.pool.publish(lease, hashes[start:], start=start, parent=hashes[start - 1] if start else None)
        self._live.append(lease)
        self.pool.cache.take_changes()
        blocks = list(lease.blocks)
        if self._live and chance.random() < 0.5:  # its answer grows
            other = chance.choice(self._live)
            if self.pool.free:
                other.extend(1)
        return len(found), blocks


def after_churn(report: Report) -> None:
    """Both pools see the same prompts, in chats of several turns; what a transfer takes is counted at the end."""
    chance = random.Random(7)
    prefill, decode = Side(6), Side(24)
    chats = [new_chat(chance) for _ in range(24)]
    pieces: list[int] = []
    moved: list[int] = []
    for _ in range(CHURN):
        # Some chats are busier than others.
        at = min(chance.randrange(len(chats)), chance.randrange(len(chats)))
        tokens = chats[at]
        _, source = prefill.serve(tokens, chance)
        held, target = decode.serve(tokens, chance)
        pieces.append(len(merge(source[held:], target[held:])))
        moved.append(len(source) - held)
        grown = tokens + chance.choices(range(1_000), k=chance.randint(16, 128))
        chats[at] = grown if len(grown) < 640 else new_chat(chance)
    last = CHURN // 10
    report.equal("random operations on both pools", len(pieces), CHURN)
    report.note("blocks per transfer, last tenth", sum(moved[-last:]) / last)
    report.note("descriptors per transfer, first hundred", sum(pieces[:100]) / 100)
    report.at_most("descriptors per transfer, last tenth", sum(pieces[-last:]) / last, DESCRIPTORS)


def new_chat(chance: random.Random) -> list[int]:
    """Its first prompt."""
    return chance.choices(range(1_000), k=chance.randint(16, 256))


def chats(report: Report) -> None:
    """Users that chat at the same time, each turn with all that was said before it, through real processes."""
    flags = ("--model=dummy:tiny", "--pool-blocks=1024", "--context-tokens=2048")
    answers: list[list[Completion]] = []
    for extra in ((), ("--no-prefix-cache",)):
        with Cluster(flags=(*flags, *extra)) as cluster, cluster.client() as client:
            with ThreadPoolExecutor(USERS) as users:
                turns = users.map(lambda user, of=client: chat(of, user), range(USERS))
                answers.append([turn for of_user in turns for turn in of_user])
            metrics = cluster.metrics("prefill-0")
        computed = metrics["paceline_engine_prompt_tokens_computed_total"]
        prompts = sum(answer.finish.usage.prompt_tokens for answer in answers[-1])
        cached = sum(answer.finish.usage.cached_tokens for answer in answers[-1])
        report.equal("prompt tokens computed and cached", int(computed) + cached, prompts)
        if extra:
            report.equal("cached tokens without the cache", cached, 0)
        else:
            report.note("prompt tokens, all turns", prompts)
            report.note("  of them a system prompt that all users share", SYSTEM_TOKENS * TURNS * USERS)
            report.at_least("prompt tokens that nobody computed", 100 * cached / prompts, 85.0, "%")
            moved = sum(answer.finish.transfer.blocks for answer in answers[-1])
            held = sum(answer.finish.transfer.held_blocks for answer in answers[-1])
            report.note("blocks that did not move", 100 * held / (held + moved), "%")
    with_cache, without = ([answer.token_ids for answer in each] for each in answers)
    report.equal("answers", len(with_cache), TURNS * USERS)
    report.equal("answers that the cache changed", sum(a != b for a, b in zip(with_cache, without, strict=True)), 0)


def chat(client: Client, user: int) -> list[Completion]:
    """One user's turns; every second one draws."""
    chance = random.Random(user)
    said = random.Random("system").choices(range(3, TINY.vocab_size), k=SYSTEM_TOKENS)
    turns: list[Completion] = []
    for turn in range(TURNS):
        said = said + chance.choices(range(3, TINY.vocab_size), k=QUESTION_TOKENS)
        temperature = 0.0 if user % 2 else 0.9
        answer = client.complete(
            said, max_tokens=ANSWER_TOKENS, temperature=temperature, seed=turn, ignore_eos=True, timeout=300.0
        )
        said = said + list(answer.token_ids)
        turns.append(answer)
    return turns


def mixed_load(report: Report) -> None:
    """Short and long prompts with short and long answers, as many as fit: slots of held blocks that hold a token."""
    chance = random.Random(3)
    weights = load(resolve("dummy:tiny", cache_dir=Path("unused")), TINY, dtype=torch.float32, device="cpu", seed=1)
    engine = Engine(TINY, weights, num_blocks=256, token_budget=512, watermark=0.92)
    served, stored, slots = 0, 0, 0
    while served < LOAD_REQUESTS or engine.has_work:
        while served < LOAD_REQUESTS:
            prompt = chance.choices(range(TINY.vocab_size), k=int(chance.triangular(32, 1_200, 400)))
            sampling = SamplingParams(max_tokens=chance.randint(8, 300), temperature=0.0, ignore_eos=True)
            lease = engine.try_reserve(len(prompt) + sampling.max_tokens - 1, upfront_tokens=len(prompt), prompt=prompt)
            if lease is None:
                break
            # As on a decode worker: its KV has landed.
            engine.add(RequestId(str(served)), prompt, sampling, lease=lease, computed=len(prompt), output=[5])
            served += 1
        engine.step()
        now_stored, now_slots = engine.occupancy
        stored, slots = stored + now_stored, slots + now_slots
    report.equal("requests served under mixed load", engine.stats.requests_finished, LOAD_REQUESTS)
    report.note("steps", engine.stats.steps)
    report.note("requests that made room", engine.stats.preemptions)
    report.at_least("stored tokens / allocated slots", 100 * stored / slots, 96.8, "%")
