"""A table of `name  measured  limit  ok/FAIL`, the same as JSON in `bench/results/`, and the exit code they mean."""

from __future__ import annotations

import json
import platform
import subprocess
import time
import traceback
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured value. `ok` None: shown for the reader, without a limit."""

    name: str
    measured: object
    limit: str
    ok: bool | None


class Report:
    """What one check or benchmark measured. `finish` once, at the end."""

    def __init__(self, name: str, console: Console | None = None, results: Path = RESULTS) -> None:
        self.name = name
        self._console = Console() if console is None else console
        self._results = results
        self._rows: list[Row] = []
        self._started = time.monotonic()

    def at_most(self, name: str, measured: float, limit: float, unit: str = "") -> bool:
        """Fails past `limit`; a NaN fails too."""
        return self._add(name, measured, f"<= {limit:g}", measured <= limit, unit)

    def at_least(self, name: str, measured: float, limit: float, unit: str = "") -> bool:
        """Fails under `limit`; a NaN fails too."""
        return self._add(name, measured, f">= {limit:g}", measured >= limit, unit)

    def equal(self, name: str, measured: object, expected: object) -> bool:
        """Fails unless both are equal."""
        return self._add(name, measured, f"== {_shown(expected)}", measured == expected, "")

    def contains(self, name: str, measured: str, *parts: str) -> bool:
        """Fails unless each part is in the text, as an error message must name a value and its limit."""
        missing = [part for part in parts if part not in measured]
        return self._add(name, measured, " and ".join(map(repr, parts)), not missing, "")

    def note(self, name: str, measured: object, unit: str = "") -> None:
        """Shows a value that has no limit."""
        self._add(name, measured, "", None, unit)

    def fail(self, name: str, why: str) -> None:
        """A failure that no number tells."""
        self._add(name, why, "", False, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """An error inside is a failure of the check, which still ends with its table."""
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        # Its first line: the traceback above has the rest, which may be the log of a cluster.
        self.fail("the check itself", f"{type(error).__name__}: {error}".partition("\n")[0])
        return True

    @property
    def ok(self) -> bool:
        """True if nothing failed, and something could have."""
        judged = [row.ok for row in self._rows if row.ok is not None]
        return bool(judged) and all(judged)

    def finish(self) -> int:
        """Prints the table, writes the JSON, and returns the exit code. A report that judged nothing has failed."""
        if not any(row.ok is not None for row in self._rows):
            self.fail("the check itself", "nothing was compared with a limit")
        table = Table(title=f"{self.name}: {'ok' if self.ok else 'FAIL'}", title_justify="left")
        for column in ("name", "measured", "limit", ""):
            table.add_column(column, overflow="fold")
        for row in self._rows:
            mark = {True: "[green]ok", False: "[red]FAIL", None: ""}[row.ok]
            table.add_row(row.name, _escape(_shown(row.measured)), _escape(row.limit), mark)
        self._console.print(table)
        self._results.mkdir(parents=True, exist_ok=True)
        (self._results / f"{self.name}.json").write_text(json.dumps(self._document(), indent=2, default=str) + "\n")
        return 0 if self.ok else 1

    def _add(self, name: str, measured: object, limit: str, ok: bool | None, unit: str) -> bool:
        if isinstance(measured, float):
            measured = float(f"{measured:.6g}")
        value = f"{_shown(measured)} {unit}" if unit else measured
        self._rows.append(Row(name, value, f"{limit} {unit}".strip() if limit else "", ok))
        return bool(ok)

    def _document(self) -> dict[str, object]:
        return {
            "name": self.name,
            "ok": self.ok,
            "commit": commit(),
            "seconds": round(time.monotonic() - self._started, 3),
            "machine": {"cores": cpu_count(), "kind": platform.machine(), "python": platform.python_version()},
            "rows": [asdict(row) for row in self._rows],
        }


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def commit() -> str | None:
    """What is checked out, None outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None
