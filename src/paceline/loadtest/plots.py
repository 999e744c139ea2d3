"""PNG plots of a run: distributions of latencies, throughput and pools over time, and a timeline of the requests."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError, StartupError
from paceline.loadtest.measure import Result
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.statistics import percentile

_BINS: Final = 60
_MOST_ROWS: Final = 400
_PERCENTS: Final = (50.0, 90.0, 99.0)
_SIZE: Final = (9.0, 5.0)
_SINCE_START: Final = "time since the start (s)"


def figure_or_refuse() -> Any:
    """matplotlib's Figure; StartupError that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise StartupError("--plots needs the package matplotlib: install paceline[bench]") from error
    return Figure


def check_plots(folder: Path) -> None:
    """Makes the folder, ahead of the load. StartupError where matplotlib is not there, ConfigError where it cannot."""
    figure_or_refuse()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # the only question that every kind of folder answers
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def draw(result: Result, folder: Path) -> list[Path]:
    """Draws into `folder`, which is made. The files, of those plots that have something to show."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_save(folder / f"{name}.png", figure) for name, figure in figures(result).items()]
    except OSError as error:
        raise _unwritable(folder, error) from error


def figures(result: Result) -> dict[str, Any]:
    """matplotlib's figures by name, of those plots that have something to show; each axis has its unit."""
    done = [outcome for outcome in result.outcomes if outcome.error is None]
    ttft_ms = [outcome.ttft_s * 1e3 for outcome in done if outcome.ttft_s is not None]
    itl_ms = [gap * 1e3 for outcome in done for gap in outcome.itl_s]
    plots: list[tuple[str, Callable[[Any], None], bool]] = [
        ("ttft", lambda axes: _distribution(axes, ttft_ms, "time to first token (ms)", "requests"), bool(ttft_ms)),
        ("itl", lambda axes: _distribution(axes, itl_ms, "inter-token latency (ms)", "gaps"), bool(itl_ms)),
        ("throughput", lambda axes: _throughput(axes, result), True),
        ("timeline", lambda axes: _timeline(axes, result.outcomes), True),
        ("pools", lambda axes: _pools(axes, result), bool(result.samples)),
    ]
    return {name: _figure(plot) for name, plot, has_data in plots if has_data}


def _figure(plot: Callable[[Any], None]) -> Any:
    figure = figure_or_refuse()(figsize=_SIZE, layout="constrained")
    plot(figure.add_subplot())
    return figure


def _save(path: Path, figure: Any) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"plots: {folder} cannot be written: {error.strerror}")


def _distribution(axes: Any, values: Sequence[float], label: str, of: str) -> None:
    """The share of values up to each value, with percentiles marked."""
    ordered = sorted(values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    for percent in _PERCENTS:
        value = percentile(ordered, percent)
        axes.axvline(value, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"p{percent:g} {value:.3g}", (value, percent / 100), (4, -12), textcoords="offset points", fontsize=8
        )
    axes.set(xlabel=label, ylabel=f"share of {len(ordered):,} {of} (0 to 1)", ylim=(0, 1.02))
    if ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
        axes.set_xscale("log")


def _throughput(axes: Any, result: Result) -> None:
    """Tokens of answers a second, and requests under way."""
    whole = result.summary.whole
    width = whole.seconds / _BINS
    edges = [whole.from_s + width * place for place in range(_BINS + 1)]
    tokens = [0.0] * _BINS
    for outcome in result.outcomes:
        for at, count in zip(outcome.arrivals_s, outcome.tokens, strict=True):
            tokens[min(_BINS - 1, math.floor((at - whole.from_s) / width))] += count / width
    axes.stairs(tokens, edges, fill=True, alpha=0.5, label="tokens of answers")
    axes.set(xlabel=_SINCE_START, ylabel="tokens of answers (tokens/s)")
    under_way = axes.twinx()
    changes = sorted(
        [(outcome.sent_s, 1) for outcome in result.outcomes] + [(outcome.ended_s, -1) for outcome in result.outcomes]
    )
    level, levels = 0, []
    for _, change in changes:
        level += change
        levels.append(level)
    under_way.step([at for at, _ in changes], levels, where="post", color="C1", linewidth=1)
    under_way.set_ylabel("requests under way (requests)", color="C1")
    steady = result.summary.steady
    if steady is not None:
        axes.axvspan(steady.from_s, steady.to_s, color="grey", alpha=0.12, label="steady state")
    axes.legend(loc="upper left")


def _timeline(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """A row for each request: until its first token, from there to its end; failures are marked."""
    step = math.ceil(len(outcomes) / _MOST_ROWS)
    shown = outcomes[::step]
    waiting, answering, failed = [], [], []
    for row, outcome in enumerate(shown):
        first = outcome.arrivals_s[0] if outcome.arrivals_s else outcome.ended_s
        waiting.append((row, outcome.sent_s, first))
        answering.append((row, first, outcome.ended_s))
        if outcome.error is not None:
            failed.append((row, outcome.ended_s))
    for spans, color, label in ((waiting, "C1", "to the first token"), (answering, "C0", "answering")):
        rows, begins, ends = zip(*spans, strict=True)
        axes.hlines(rows, begins, ends, color=color, linewidth=1.5, label=label)
    if failed:
        rows, ends = zip(*failed, strict=True)
        axes.plot(ends, rows, "rx", label="failed")
    every = "" if step == 1 else f", every {step}th"
    axes.set(xlabel=_SINCE_START, ylabel=f"request (number in order{every})")
    axes.legend(loc="lower right")


def _pools(axes: Any, result: Result) -> None:
    """Each worker's share of blocks in use."""
    moments = [sample.at_s for sample in result.samples]
    for pool in result.pools:
        shares = []
        for sample in result.samples:
            seen = next((worker for worker in sample.workers if worker.worker == pool.worker), None)
            shares.append(math.nan if seen is None else seen.used_blocks / max(1, seen.total_blocks))
        axes.plot(moments, shares, label=pool.worker)
    axes.set(xlabel=_SINCE_START, ylabel="blocks in use (share of the pool, 0 to 1)", ylim=(0, 1.02))
    axes.legend(loc="upper left")
