"""`paceline up` with the model cached: seconds until the router serves and knows every worker."""

from __future__ import annotations

import os
import statistics

from cluster import Cluster
from paceline.checkpoint import resolve
from paceline.config import UpConfig, load
from processes import load_average, tree
from report import Report

STARTS = 3
LIMIT_S = 15.0


def run(report: Report) -> None:
    """Starts a cluster several times, from the command to readiness, and takes the median."""
    settings = load(UpConfig, file=None, env=os.environ, flags={})
    resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline)
    report.note("load average of the machine", load_average())
    waits = []
    for start in range(1, STARTS + 1):
        with Cluster(prefill=1, decode=1, flags=("--offline",)) as cluster, cluster.client() as client:
            waits.append(cluster.ready_after_s)
            processes = tree(cluster.pid)
            answer = client.complete("The capital of France is", max_tokens=2, temperature=0.0)
        report.equal(f"start {start}: the first answer", answer.text.strip(" ."), "Paris")
        report.note(f"start {start}: ready after", cluster.ready_after_s, "s")
        report.note(f"start {start}: CPU time until then", sum(process.cpu_s for process in processes), "s")
    for process in processes:
        report.note(f"  {process.name}, CPU time", process.cpu_s, "s")
    report.at_most(f"ready after, median of {STARTS}", statistics.median(waits), LIMIT_S, "s")
