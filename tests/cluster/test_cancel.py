"""Requests that are given up, at every stage of their lives and in masses, on real processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.client import Stream
from paceline.testing.scrape import wait_for
from paceline.testing.stages import CancelBench, Stage, cancel_landed

pytestmark = pytest.mark.cluster

HITS = 3


@pytest.fixture(scope="module")
def bench() -> Iterator[CancelBench]:
    with CancelBench() as bench:
        yield bench
    assert bench.calls_cut == 0


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.LANDED])
def test_a_cancel_stops_both_workers_and_brings_every_block_back(bench: CancelBench, stage: Stage) -> None:
    """F27, and F29 for the stages in which a writer is stopped with its write under way."""
    assert bench.cancel_at(stage, HITS).hits >= HITS


def test_a_cancel_between_landing_and_the_next_step_computes_nothing_more(tmp_path: Path) -> None:
    tally = cancel_landed(tmp_path, HITS)
    assert tally.hits == HITS
    assert set(tally.tokens_after) == {0}


def test_masses_of_disconnects_leave_nothing_behind_and_the_next_request_is_served(bench: CancelBench) -> None:
    """F30: whoever waits, computes, writes or decodes; the last blocks come back while nothing else runs."""
    for _ in range(2):
        streams = [bench.ask(1_900) for _ in range(60)]
        wait_for(lambda: bench.client.loads().active > 0, "a start")
        next(streams[0])
        for stream in streams:
            stream.cancel()
        bench.cluster.wait_idle()
        bench.check()


def test_hundreds_of_streams_cancelled_midway_leave_no_call_and_no_memory_behind(bench: CancelBench) -> None:
    """F48: after a first few, which fill what is kept on purpose, memory no longer grows."""
    pids = [pid for pids in bench.cluster.processes.values() for pid in pids]
    cancel_midway(bench, 60)
    before = sum(resident_bytes(pid) for pid in pids)
    cancel_midway(bench, 300)
    grown = sum(resident_bytes(pid) for pid in pids) - before
    bench.cluster.wait_idle()
    bench.check()
    assert grown < 300 * 20_000, f"{grown / 300:.0f} bytes a cancelled stream"


def cancel_midway(bench: CancelBench, number: int) -> None:
    for begin in range(0, number, 20):
        streams: list[Stream] = [bench.ask(16) for _ in range(begin, min(begin + 20, number))]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.cancel()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
