"""Many requests through pools that hold a third of them: each ends once, and every block comes back."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from paceline.client import Chunk, Client, Finish
from paceline.types import FinishReason, blocks_for
from report import Report

REQUESTS = 64
SEED = 20
BACK_S = 10.0
"""Bound on the wait for the last blocks after the last answer. It bounds liveness; the time it took is shown."""
WORKERS = ("prefill-0", "decode-0")
STATES = ("free", "committed", "quarantined", "total")


@dataclass(frozen=True)
class Ask:
    """One request, by its lengths in tokens."""

    prompt: list[int]
    max_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks it holds on D at its end. The last token's KV is never stored."""
        return blocks_for(len(self.prompt) + self.max_tokens - 1)


@dataclass(frozen=True)
class Answer:
    """What came back: every piece in order."""

    ask: Ask
    chunks: list[Chunk]

    @property
    def finishes(self) -> list[Finish]:
        """Ends of the answer: there must be one."""
        return [chunk.finish for chunk in self.chunks if chunk.finish is not None]

    @property
    def whole(self) -> bool:
        """True where it ended once, with its last piece, and has each token once."""
        indices = [chunk.index + place for chunk in self.chunks for place in range(len(chunk.token_ids))]
        ended = [chunk.finish is not None for chunk in self.chunks]
        return indices == list(range(self.ask.max_tokens)) and ended.index(True) == len(ended) - 1

    @property
    def honest(self) -> bool:
        """True where its end says the same."""
        [finish] = self.finishes
        usage = finish.usage
        lengths = (usage.prompt_tokens, usage.completion_tokens)
        return lengths == (len(self.ask.prompt), self.ask.max_tokens) and finish.reason is FinishReason.LENGTH


def requests() -> list[Ask]:
    """Lengths from one token to several chunks of prompt, and from one token to fifty of answer."""
    draw = random.Random(SEED)
    lengths = [
        draw.choice((draw.randint(1, 16), draw.randint(17, 120), draw.randint(121, 700))) for _ in range(REQUESTS)
    ]
    return [
        Ask([draw.randint(100, 40_000) for _ in range(length)], draw.choice((1, 2, draw.randint(3, 50))))
        for length in lengths
    ]


def run(report: Report) -> None:
    """All at once, with the pools watched."""
    asks = requests()
    # Each side by what it holds: P the prompts, D prompts and answers. The largest request must fit by itself.
    prompt_blocks = [blocks_for(len(ask.prompt)) for ask in asks]
    all_blocks = [ask.blocks for ask in asks]
    pools = {"prefill-0": sum(prompt_blocks) // 3, "decode-0": sum(all_blocks) // 3}
    report.note("requests", f"{REQUESTS}, of {min(all_blocks)} to {max(all_blocks)} blocks")
    for name, wanted in (("prefill-0", prompt_blocks), ("decode-0", all_blocks)):
        report.note(f"{name}: blocks that all need, and that there are", f"{sum(wanted)}, {pools[name]}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(
            # The pools are to be what is short, and neither slots nor patience.
            f"[router]\nqueue_timeout_s = 600\nprefill_slots = {REQUESTS}\n"
            f"[prefill]\npool_blocks = {pools['prefill-0']}\n[decode]\npool_blocks = {pools['decode-0']}\n"
        )
        with Cluster(prefill=1, decode=1, flags=(f"--config={config}",)) as cluster, cluster.client() as client:
            watch = Watch(cluster)
            began = time.monotonic()
            with watch, ThreadPoolExecutor(REQUESTS) as clients:
                answers = list(clients.map(lambda ask: fetch(client, ask), asks))
            took_s = time.monotonic() - began
            back_s = wait_until_free(cluster)
            states = {worker: pool(cluster, worker) for worker in WORKERS}
            fallbacks = {name: value for name, value in cluster.metrics("router").items() if "fallbacks_total" in name}
    check_answers(report, answers)
    for worker in WORKERS:
        report.equal(f"{worker}: blocks in its pool", states[worker]["total"], pools[worker])
        report.at_least(f"{worker}: most blocks in use", watch.peaks[worker], pools[worker] / 2)
        report.at_most(f"{worker}: most blocks committed", watch.committed[worker], pools[worker])
        report.equal(f"{worker}: blocks free at the end", states[worker]["free"], states[worker]["total"])
        report.equal(f"{worker}: blocks committed at the end", states[worker]["committed"], 0)
        report.equal(f"{worker}: blocks in quarantine", states[worker]["quarantined"], 0)
    report.note("looks at the pools", watch.looks)
    report.equal("looks that found no pool", watch.failures, [])
    report.note("placed again or elsewhere", fallbacks or "never")
    report.at_most("blocks back after the last answer", back_s, BACK_S, "s")
    report.note("all answered after", took_s, "s")
    report.note("answer tokens", sum(ask.max_tokens for ask in asks))


def fetch(client: Client, ask: Ask) -> Answer:
    """Streams one answer to its end."""
    with client.generate(ask.prompt, max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True) as stream:
        return Answer(ask, list(stream))


def check_answers(report: Report, answers: list[Answer]) -> None:
    """Each ended once and is whole, and all prompts were handed over."""
    report.equal("answers", len(answers), REQUESTS)
    report.equal("answers with one end each", sum(len(answer.finishes) == 1 for answer in answers), REQUESTS)
    report.equal("answers with each token once, then the end", sum(answer.whole for answer in answers), REQUESTS)
    report.equal("answers whose usage says so", sum(answer.honest for answer in answers), REQUESTS)
    local = [answer for answer in answers if answer.finishes[0].prompt_tokens_computed_on_decode]
    report.equal("prompts computed on D", len(local), 0)


class Watch:
    """Looks at both pools again and again while its block runs. `peaks` and `committed` are in blocks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peaks = dict.fromkeys(WORKERS, 0.0)
        self.committed = dict.fromkeys(WORKERS, 0.0)
        self.looks = 0
        self.failures: list[str] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            for worker in WORKERS:
                try:
                    state = pool(self._cluster, worker)
                except (OSError, KeyError) as error:
                    self.failures.append(f"{worker}: {error!r}")
                    continue
                self.peaks[worker] = max(self.peaks[worker], state["total"] - state["free"])
                self.committed[worker] = max(self.committed[worker], state["committed"])
                self.looks += 1


def pool(cluster: Cluster, worker: str) -> dict[str, float]:
    """The worker's blocks by state."""
    samples = cluster.metrics(worker)
    return {state: samples[f'paceline_pool_blocks{{state="{state}"}}'] for state in STATES}


def wait_until_free(cluster: Cluster) -> float:
    """Seconds until both pools are whole, or until it is too late."""
    began = time.monotonic()
    while True:
        states = [pool(cluster, worker) for worker in WORKERS]
        waited = time.monotonic() - began
        if waited > BACK_S or all(state["free"] == state["total"] for state in states):
            return waited
        time.sleep(0.05)
