"""`paceline bench`: loads a server, and says how it bears that."""

from __future__ import annotations

import argparse
import asyncio
import os
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.output import stderr_console, stdout_console
from paceline.loadtest.config import BenchConfig, load_bench
from paceline.loadtest.frames import Progress as Counts
from paceline.loadtest.measure import Probe, Result, find_goodput, measure
from paceline.loadtest.plots import draw, figure_or_refuse
from paceline.loadtest.record import check_json, result_record, search_record, write_json
from paceline.loadtest.table import result_table, search_table


def run(arguments: argparse.Namespace) -> int:
    """0 where every request was answered, and a search found a rate; 1 elsewhere."""
    config = load_bench(file=arguments.config, env=os.environ, flags=vars(arguments))
    # Before the load, not after it.
    if config.plots is not None:
        figure_or_refuse()
    if config.json is not None:
        check_json(config.json)
    return _search(config) if config.find_goodput else _once(config)


def _once(config: BenchConfig) -> int:
    with _Bar() as bar:
        result = asyncio.run(measure(config, bar.update))
    stdout_console().print(result_table(result))
    if config.json is not None:
        write_json(config.json, result_record(result, arrivals=config.json_arrivals))
    _draw(config, result)
    return 0 if result.summary.succeeded == result.summary.sent else 1


def _search(config: BenchConfig) -> int:
    with _Bar() as bar:
        found = asyncio.run(find_goodput(config, bar.update, bar.probed))
    console = stdout_console()
    if found.best is not None:
        console.print(result_table(found.best))
    console.print(search_table(found))
    if config.json is not None:
        write_json(config.json, search_record(found, arrivals=config.json_arrivals))
    if found.best is not None:
        _draw(config, found.best)
    return 0 if found.rate is not None else 1


def _draw(config: BenchConfig, result: Result) -> None:
    if config.plots is not None:
        draw(result, config.plots)


class _Bar:
    """How far a run is, on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        console = stderr_console()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[under_way]} under way, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None, under_way=0, failed=0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def update(self, counts: Counts, expected: int | None) -> None:
        """Shows the counts."""
        self._progress.update(
            self._task,
            total=expected,
            completed=counts.ended,
            under_way=counts.sent - counts.ended,
            failed=counts.failed,
        )

    def probed(self, probe: Probe) -> None:
        """A line for a run of a search."""
        verdict = "went well" if probe.well else "was too much"
        self._progress.console.print(f"{probe.rate:.4g} requests/s {verdict}")
