"""kill -9 of engines and fronts of both tiers under load, on two of each: the others serve on, the killed come back.

A request fails only where the decode worker that had it was killed after its first token, and then says so. One whose
prefill worker was killed finishes all the same. Between two kills, every block of the survivors must be back.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import dataclass, field

from cluster import Cluster
from paceline.client import Worker, worker_info, worker_load
from paceline.errors import PacelineError, WorkerLost
from paceline.testing.scrape import wait_for
from paceline.testing.traffic import REQUEST_S, Outcome, Traffic
from paceline.types import WorkerKey
from processes import load_average
from report import Report

ROUNDS = (
    ("prefill", 0, "engine"),
    ("decode", 0, "engine"),
    ("prefill", 1, "front"),
    ("decode", 1, "front"),
    ("prefill", 0, "front"),
    ("decode", 1, "engine"),
    ("prefill", 1, "engine"),
    ("decode", 0, "front"),
    ("decode", 0, "engine"),
    ("prefill", 0, "engine"),
)
REJOIN_S = 30.0
BACK_S = 60.0
BEFORE_S, AFTER_S = 1.0, 1.0  # of load around a kill and the return


@dataclass
class Kill:
    """One round."""

    victim: WorkerKey
    part: str
    rejoined_s: float = 0.0
    back_s: float = 0.0
    served_while_away: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        """Requests that did not get their answer."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def wrongly_failed(self) -> list[str]:
        """Errors other than that of a request whose decode worker was the victim."""
        return [
            f"{error.reason}: {error.message}"
            for outcome in self.failed
            if (error := outcome.error) is not None
            and not (isinstance(error, WorkerLost) and str(self.victim) in error.message and self.on_decode)
        ]

    @property
    def on_decode(self) -> bool:
        """True where a decode worker was killed."""
        return self.victim.worker_id.startswith("decode")


def run(report: Report) -> None:
    """Ten kills, one after the other, with the load on."""
    report.note("load average of the machine", load_average())
    flags = (
        "--model=dummy:tiny",
        "--pool-blocks=512",
        "--max-batch-tokens=64",
        "--no-prefix-cache",  # equal prompts are to be computed each time
        "--threads=1",
        "--max-deaths=50",
    )
    with Cluster(prefill=2, decode=2, flags=flags) as cluster:
        traffic = Traffic(cluster.router)
        kills = [kill(cluster, traffic, *each) for each in ROUNDS]
    for number, each in enumerate(kills, 1):
        show(report, number, each)
    report.equal("kills", len(kills), len(ROUNDS))
    outcomes = [outcome for each in kills for outcome in each.outcomes]
    report.at_most("slowest request of all", max(outcome.seconds for outcome in outcomes), REQUEST_S, "s")
    report.note("requests in all", len(outcomes))
    report.note("rejoined after, median", statistics.median(each.rejoined_s for each in kills), "s")


def kill(cluster: Cluster, traffic: Traffic, role: str, index: int, part: str) -> Kill:
    """One round: load, the kill, the return, and the wait for every block."""
    victim = worker(cluster, f"{role}-{index}")
    pids = worker_info(victim.address, victim.role).process_ids
    done = Kill(victim.key, part)
    with traffic.flowing():
        time.sleep(BEFORE_S)
        killed_at = time.monotonic()
        os.kill(pids[0] if part == "front" else pids[1], signal.SIGKILL)
        done.rejoined_s = wait_for(lambda: has_rejoined(cluster, victim.key), f"the return of {victim.key}", timeout=90)
        back_at = time.monotonic()
        time.sleep(AFTER_S)
    done.outcomes = traffic.take()
    done.served_while_away = sum(
        outcome.error is None and killed_at < outcome.began and outcome.ended < back_at for outcome in done.outcomes
    )
    done.back_s = wait_for(lambda: whole(cluster), "the return of every block", timeout=2 * BACK_S)
    return done


def show(report: Report, number: int, done: Kill) -> None:
    """One round's rows."""
    name = f"{number}: {done.victim.worker_id} {done.part}"
    served = [outcome for outcome in done.outcomes if outcome.error is None]
    report.at_most(f"{name}: rejoined under a new epoch after", done.rejoined_s, REJOIN_S, "s")
    report.at_most(f"{name}: every block free, none quarantined, after", done.back_s, BACK_S, "s")
    report.at_least(f"{name}: requests served", len(served), 1)
    report.at_least(f"{name}: of them, begun and ended while it was away", done.served_while_away, 1)
    report.equal(f"{name}: of them, with a wrong token", sum(not outcome.right for outcome in served), 0)
    report.note(f"{name}: requests lost with their decode worker", len(done.failed) - len(done.wrongly_failed))
    report.equal(f"{name}: other failures", done.wrongly_failed[:3], [])


def worker(cluster: Cluster, name: str) -> Worker:
    """A worker by its id, once it is registered."""
    with cluster.client() as client:
        return next(each for each in client.loads().workers if each.key.worker_id == name)


def has_rejoined(cluster: Cluster, victim: WorkerKey) -> bool:
    """True when the router knows a later life of it."""
    with cluster.client() as client:
        return any(
            each.key.worker_id == victim.worker_id and each.key.epoch > victim.epoch for each in client.loads().workers
        )


def whole(cluster: Cluster) -> bool:
    """True when all four are registered, idle, and have every block free."""
    try:
        with cluster.client() as client:
            workers = client.loads().workers
        loads = [worker_load(each.address, each.role) for each in workers]
    except PacelineError:
        return False
    return len(loads) == cluster.prefill + cluster.decode and all(
        load.free_blocks == load.total_blocks and load.committed_blocks == load.quarantined_blocks == 0
        for load in loads
    )
