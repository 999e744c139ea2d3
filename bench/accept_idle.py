"""An idle cluster: all its processes together use next to no CPU, also after they have served."""

from __future__ import annotations

import time

from cluster import Cluster
from processes import Process, load_average, tree
from report import Report

REQUESTS = 6
SETTLE_S = 5.0
WATCH_S = 30.0
LIMIT_PERCENT = 2.0
ROLES = 6  # up, the router, two fronts, two engines


def run(report: Report) -> None:
    """Serves some requests, waits a moment, and watches the whole process tree."""
    with Cluster(prefill=1, decode=1) as cluster, cluster.client() as client:
        for length in range(1, REQUESTS + 1):
            finish = client.complete([5] * 50 * length, max_tokens=8, temperature=0.0, ignore_eos=True).finish
            if finish.prefill_worker is None:
                report.fail(f"request {length}", "its prompt was not handed over")
        time.sleep(SETTLE_S)
        before, began = tree(cluster.pid), time.monotonic()
        time.sleep(WATCH_S)
        after, seconds = tree(cluster.pid), time.monotonic() - began
    report.note("requests served before", REQUESTS)
    report.note("load average of the machine", load_average())
    report.equal("the same processes live on", pids(after), pids(before))
    report.at_least("processes watched", len(before), ROLES)
    used_s = {process.pid: process.cpu_s for process in before}
    percent = {process.pid: 100 * (process.cpu_s - used_s.get(process.pid, 0.0)) / seconds for process in after}
    for process in after:
        report.note(f"  {process.name} ({process.pid})", percent[process.pid], "% of a core")
    report.at_most(f"all together over {seconds:.0f} s", sum(percent.values()), LIMIT_PERCENT, "% of a core")


def pids(processes: list[Process]) -> list[int]:
    """Their process ids."""
    return [process.pid for process in processes]
