"""How commands write: errors in red on stderr, figures in units that people read."""

from __future__ import annotations

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.text import Text

from paceline.errors import PacelineError, WorkerLost

_FILE_WIDTH: Final = 200


def stderr_console() -> Console:
    """A console on stderr that neither wraps nor guesses colours."""
    return Console(stderr=True, highlight=False, soft_wrap=True, width=_width(sys.stderr))


def stdout_console() -> Console:
    """A console on stdout for tables."""
    return Console(highlight=False, width=_width(sys.stdout))


def _width(stream: TextIO) -> int | None:
    # A file or a pipe has no width, and nothing should be cut for it.
    return None if stream.isatty() else _FILE_WIDTH


def print_error(message: str) -> None:
    """One line, whatever the message holds."""
    stderr_console().print(Text(f"error: {' '.join(message.split())}", style="bold red"))


def explain(error: PacelineError) -> str:
    """The error's message; where nobody listens at an address, what to do about it."""
    if isinstance(error, WorkerLost) and "Connection refused" in error.message:
        return f"{error.message.partition(': ')[0]}: connection refused; is a router running there? (paceline up)"
    return error.message


def counted(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def milliseconds(seconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.23 s`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def byte_size(count: int) -> str:
    """`512 B`, `1.5 KiB`, `92.2 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
