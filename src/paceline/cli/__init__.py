"""The command line. Each subcommand imports what it needs when it runs: `paceline generate` never imports torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status, which `paceline.cli.entry` explains."""
    with _quiet_interrupt():
        from paceline.cli.entry import main as run  # it takes a good part of a second, in which Ctrl-C may come

    return run(argv)


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Ends the process at once on Ctrl-C: amid imports KeyboardInterrupt may be swallowed, or come out as another."""
    replaceable = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not replaceable or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
