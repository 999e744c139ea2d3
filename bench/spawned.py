"""Processes of a benchmark's own, each with a pipe: what several of them do at once is measured in each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
"""How long a process may say nothing that is waited for."""


class Process:
    """A spawned process that runs `body(pipe, *arguments)`. Ends with its `with` block."""

    def __init__(self, body: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()  # else nobody would ever hear of the process's death

    def tell(self, message: object) -> None:
        """Sends it something."""
        self._pipe.send(message)

    def hear(self) -> Any:
        """What it says next. Raises TimeoutError, or EOFError once it is dead."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"a process said nothing for {PATIENCE_S:g} s")
        return self._pipe.recv()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._pipe.close()  # which ends it
        self._process.join(10)
        self._process.kill()
