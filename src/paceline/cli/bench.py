"""`paceline bench`: loads a server, and says how it bears that."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import INTERRUPTED
from paceline.cli.output import stderr_console, stdout_console
from paceline.errors import RequestCancelled
from paceline.loadtest.config import BenchConfig, load_bench
from paceline.loadtest.frames import Progress as Counts
from paceline.loadtest.measure import Probe, Result, find_goodput, measure
from paceline.loadtest.plots import check_plots, draw
from paceline.loadtest.record import check_json, result_record, search_record, write_json
from paceline.loadtest.table import result_table, search_table

R = TypeVar("R")


def run(arguments: argparse.Namespace) -> int:
    """0 where every request was answered, and a search found a rate; 130 after Ctrl-C, with what is known; else 1."""
    config = load_bench(file=arguments.config, env=os.environ, flags=vars(arguments))
    # Before the load, not after it.
    if config.plots is not None:
        check_plots(config.plots)
    if config.json is not None:
        check_json(config.json)
    return _search(config) if config.find_goodput else _once(config)


def _once(config: BenchConfig) -> int:
    with _Bar() as bar:
        result = _run(lambda interrupted: measure(config, bar.update, interrupted=interrupted))
    stdout_console().print(result_table(result))
    if config.json is not None:
        write_json(config.json, result_record(result, arrivals=config.json_arrivals))
    _draw(config, result)
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.summary.succeeded == result.summary.sent else 1


def _search(config: BenchConfig) -> int:
    with _Bar() as bar:
        found = _run(lambda interrupted: find_goodput(config, bar.update, bar.probed, interrupted=interrupted))
    console = stdout_console()
    if found.best is not None:
        console.print(result_table(found.best))
    console.print(search_table(found))
    if config.json is not None:
        write_json(config.json, search_record(found, arrivals=config.json_arrivals))
    if found.best is not None:
        _draw(config, found.best)
    if found.interrupted:
        return INTERRUPTED
    return 0 if found.rate is not None else 1


def _run(work: Callable[[asyncio.Event], Coroutine[Any, Any, R]]) -> R:
    """Does the work, which the first Ctrl-C asks to end with what it has; KeyboardInterrupt where that is nothing.

    The second Ctrl-C ends it as it is.
    """

    async def interruptible() -> R:
        interrupted = asyncio.Event()
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"

        def on_interrupt() -> None:
            if interrupted.is_set():
                task.cancel()
            interrupted.set()

        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            return await work(interrupted)
        except (RequestCancelled, asyncio.CancelledError):
            if interrupted.is_set():
                raise KeyboardInterrupt from None
            raise

    return asyncio.run(interruptible())


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
