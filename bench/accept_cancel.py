"""Cancels at every stage of a request's life: both workers stop, every block is back, and the next request is served.

The stages are held and hit on a cluster of real processes, and `landed` with both engines in one; what a cancel hit is
read from the decode worker's metrics.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from paceline.testing.cancel_ground import CHUNK_TOKENS
from paceline.testing.stages import CancelBench, Stage, Tally, cancel_landed
from processes import load_average
from report import Report

HITS = 50
STOP_S = 2.0
"""Bound on the time from the cancel until neither worker has the request. It bounds liveness; what it took is shown."""
RETURN_S = 10.0
"""The same for the blocks. Those that a writer was granted wait for a second behind their writer's end."""
STEP_TOKENS = {Stage.MID_CHUNK: CHUNK_TOKENS, Stage.LOCAL: CHUNK_TOKENS, Stage.RUNNING: 1, Stage.LANDED: 0}


def run(report: Report) -> None:
    """Every stage in turn, on one cluster, which must end with nothing in hand."""
    report.note("load average of the machine", load_average())
    with CancelBench() as bench:
        for stage in Stage:
            if stage is not Stage.LANDED:
                show(report, bench.cancel_at(stage, HITS))
    with tempfile.TemporaryDirectory() as folder:
        show(report, cancel_landed(Path(folder), HITS))
    report.equal("the cluster stops cleanly, with no call in hand", bench.calls_cut, 0)


def show(report: Report, tally: Tally) -> None:
    """One stage's rows."""
    name = tally.stage.value
    report.at_least(f"{name}: cancels that hit it (of {tally.tries})", tally.hits, HITS)
    report.at_most(f"{name}: until both workers have stopped, slowest", tally.slowest_stop_s, STOP_S, "s")
    report.at_most(f"{name}: until all blocks are free, slowest", tally.slowest_return_s, RETURN_S, "s")
    report.at_least(f"{name}: requests served after, with the right tokens", tally.served_after, 1)
    if tally.stage in STEP_TOKENS:
        report.at_least(f"{name}: cancels whose tokens were counted", len(tally.tokens_after), HITS)
        middle = statistics.median(tally.tokens_after)
        # Of a step that was under way. The most may hold earlier steps, whose report the stop kept back.
        report.at_most(f"{name}: tokens computed after the cancel, median", middle, STEP_TOKENS[tally.stage])
        report.note(f"{name}: tokens computed after the cancel, most", max(tally.tokens_after))
