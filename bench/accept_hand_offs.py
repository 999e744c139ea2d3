"""kill -9 of a prefill worker while 60 prompts are handed over: no stream waits for a timer to go on.

A prompt whose first token is out may still miss its last blocks. Its decode worker gives a silent writer ten seconds;
the router hears of the death at once, and has it moved.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

from accept_kill import whole, worker
from cluster import Cluster
from paceline.client import Finish, worker_info, worker_load
from paceline.errors import PacelineError
from paceline.testing.scrape import wait_for
from processes import load_average
from report import Report

STREAMS = 60
ROUNDS = ("engine", "front") * 3
BUSY_BLOCKS = 100
"""Blocks in the victim's hands when it is killed: several prompts, some of them answered and on their way."""
WAIT_S = 4.0
"""Bound on a stream's longest wait between two pieces; the other prompts are computed on two cores beside it."""
FLAGS = (
    "--model=dummy:tiny",
    "--pool-blocks=2048",
    "--max-batch-tokens=64",
    "--no-prefix-cache",
    "--threads=1",
    "--max-deaths=50",
)


@dataclass
class Stream:
    """One answer: the longest wait after its first piece, and how it ended."""

    longest_wait_s: float = 0.0
    finish: Finish | None = None
    error: PacelineError | None = None


def run(report: Report) -> None:
    """Rounds of one burst and one kill each, on two prefill workers and a decode worker."""
    report.note("load average of the machine", load_average())
    moved_in_all = 0
    all_at_once = {**os.environ, "PACELINE_PREFILL_SLOTS": str(STREAMS)}
    with Cluster(prefill=2, decode=1, flags=FLAGS, env=all_at_once) as cluster:
        for number, part in enumerate(ROUNDS, 1):
            streams = burst(cluster, part)
            name = f"{number}: {part}"
            moved = sum(stream.finish is not None and stream.finish.attempts > 1 for stream in streams)
            moved_in_all += moved
            report.note(f"{name}: prompts that were computed again", moved)
            report.equal(f"{name}: failures", [str(stream.error) for stream in streams if stream.error is not None], [])
            report.at_most(f"{name}: longest wait", max(stream.longest_wait_s for stream in streams), WAIT_S, "s")
    report.at_least("prompts that were computed again, in all", moved_in_all, 1)


def burst(cluster: Cluster, part: str) -> list[Stream]:
    """All streams at once, and the death of a part of one prefill worker among them; every block is back after it."""
    victim = worker(cluster, "prefill-0")
    pid = worker_info(victim.address, victim.role).process_ids[0 if part == "front" else 1]
    streams = [Stream() for _ in range(STREAMS)]
    threads = [threading.Thread(target=read, args=(cluster, *each)) for each in enumerate(streams)]
    for thread in threads:
        thread.start()
    # A burst is over in a second or two; where the look came too late the kill hits nothing, which the report shows.
    while any(thread.is_alive() for thread in threads):
        if worker_load(victim.address, victim.role).committed_blocks > BUSY_BLOCKS:
            break
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    wait_for(lambda: whole(cluster), "the return of every block", timeout=90)
    return streams


def read(cluster: Cluster, number: int, stream: Stream) -> None:
    """Reads one answer to its end."""
    prompt = [(11 * number + 7 * place) % 500 + 3 for place in range(100 + 10 * number)]
    last: float | None = None
    with cluster.client() as client:
        try:
            for piece in client.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True, timeout=60.0):
                now = time.monotonic()
                if last is not None:
                    stream.longest_wait_s = max(stream.longest_wait_s, now - last)
                last = now
                stream.finish = piece.finish or stream.finish
        except PacelineError as error:
            stream.error = error
