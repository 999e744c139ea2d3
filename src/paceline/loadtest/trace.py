"""Reads a trace: what was asked of some server, and when. JSON lines or CSV, under the field names in common use."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.errors import ConfigError, quote

# Ours first; then Mooncake's, and those of the Azure LLM inference traces. Compared without case.
_MOMENT: Final = ("timestamp", "time", "arrived_at")
_INPUT: Final = ("input_tokens", "input_length", "contexttokens", "prompt_tokens")
_OUTPUT: Final = ("output_tokens", "output_length", "generatedtokens", "completion_tokens")


class Entry(NamedTuple):
    """One request of a trace. `at_s` counts from the first one."""

    at_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, *, unit: str) -> list[Entry]:
    """The requests in the order of their moments, which are numbers of `unit` (s or ms), or ISO 8601 dates with time.

    Raises ConfigError, which names the row, for a file that cannot be read so, or is empty.
    """
    scale = 1e-3 if unit == "ms" else 1.0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file) if path.suffix.lower() == ".csv" else _json_lines(path, file)
            found = [_entry(row, f"trace {path}, row {number}", scale) for number, row in enumerate(rows, start=1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"trace {path} has no request")
    found.sort()
    first = found[0].at_s
    return [entry._replace(at_s=entry.at_s - first) for entry in found]


def _json_lines(path: Path, file: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"trace {path}, line {number}: {quote(line.strip())} is not JSON") from error
        if not isinstance(row, dict):
            raise ConfigError(f"trace {path}, line {number}: {quote(row)} is not an object")
        yield row


def _entry(row: Mapping[str, Any], where: str, scale: float) -> Entry:
    fields = {name.strip().lower(): value for name, value in row.items() if isinstance(name, str)}
    return Entry(
        at_s=_moment(_field(fields, _MOMENT, where), where, scale),
        input_tokens=_count(_field(fields, _INPUT, where), where, "input tokens"),
        output_tokens=_count(_field(fields, _OUTPUT, where), where, "output tokens"),
    )


def _field(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if fields.get(name) is not None:
            return fields[name]
    raise ConfigError(f"{where}: none of {', '.join(names)} is there, but {', '.join(fields) or 'nothing'}")


def _moment(value: Any, where: str, scale: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _date(value, where)
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {number} is not a moment")
    return number * scale


def _date(value: Any, where: str) -> float:
    try:
        date = datetime.fromisoformat(str(value).strip())
    except ValueError as error:
        raise ConfigError(f"{where}: {quote(value)} is neither a number nor a date") from error
    # Without a zone all are of one: of one without summer time, so that none is an hour off.
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _count(value: Any, where: str, what: str) -> int:
    try:
        count = int(value)
        if isinstance(value, float) and value != count:
            raise ValueError("it would be cut off")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {what} {quote(value)} is not a whole number") from error
    if count < 1:
        raise ConfigError(f"{where}: {what} {count} is under the limit of 1")
    return count
