"""A result as JSON, for other programs. Times are seconds, moments count from the start of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.errors import ConfigError
from paceline.loadtest.measure import Found, Result
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.statistics import percentile
from paceline.loadtest.summary import SLO_PERCENT

_DIGITS = 6


def result_record(result: Result, *, arrivals: bool = False) -> dict[str, Any]:
    """Everything measured; of each request its own figures, and its arrivals where they are wanted."""
    summary: dict[str, Any] = msgspec.to_builtins(result.summary)
    for window in ("whole", "steady"):
        throughput = getattr(result.summary, window)
        if throughput is not None:
            summary[window] |= {"tokens_per_s": throughput.tokens_per_s, "requests_per_s": throughput.requests_per_s}
    return {
        "paceline": __version__,
        "config": msgspec.to_builtins(result.config, enc_hook=str),
        "target": msgspec.to_builtins(result.info),
        "summary": summary,
        "warnings": result.warnings,
        "stopped": result.stopped,
        "interrupted": result.interrupted,
        "pools": msgspec.to_builtins(result.pools),
        "generators": msgspec.to_builtins(result.generators),
        "requests": [_request(outcome, arrivals) for outcome in result.outcomes],
        "samples": msgspec.to_builtins(result.samples),
    }


def search_record(found: Found, *, arrivals: bool = False) -> dict[str, Any]:
    """The rate, and every run of the search."""
    probes = [
        {"rate": probe.rate, "well": probe.well, "result": result_record(probe.result, arrivals=arrivals)}
        for probe in found.probes
    ]
    return {
        "paceline": __version__,
        "goodput_rate": found.rate,
        "interrupted": found.interrupted,
        "probes": probes,
    }


def check_json(path: Path) -> None:
    """Makes the folder, ahead of the load. Raises ConfigError where a record could not be written there after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):  # the only question that every kind of folder and file system answers
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"json: {path} cannot be written: {error.strerror}") from error


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes a record. Raises ConfigError where that cannot be."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"json: {path} cannot be written: {error.strerror}") from error


def _request(outcome: Outcome, arrivals: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": outcome.index,
        "scheduled_s": _rounded(outcome.scheduled_s),
        "sent_s": _rounded(outcome.sent_s),
        "ended_s": _rounded(outcome.ended_s),
        "ttft_s": _rounded(outcome.ttft_s),
        "itl_p99_s": _rounded(percentile(sorted(gaps), SLO_PERCENT)) if (gaps := outcome.itl_s) else None,
        "tpot_s": _rounded(outcome.tpot_s),
        "input_tokens": outcome.input_tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
        "error": outcome.error,
        "message": outcome.message,
        "served": msgspec.to_builtins(outcome.served),
    }
    if arrivals:
        record |= {"arrivals_s": _all_rounded(outcome.arrivals_s), "tokens": outcome.tokens}
    return record


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _all_rounded(values: Sequence[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
