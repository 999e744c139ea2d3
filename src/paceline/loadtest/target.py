"""The seam to what is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, Self

import msgspec

from paceline.client import Loads
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.workload import Job


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded. `context_tokens` is None where it does not say."""

    address: str
    model: str
    vocab_size: int
    context_tokens: int | None


class Clock:
    """Seconds from a moment that all processes of a run know, by the kernel's monotonic clock, which they share."""

    def __init__(self, start: float) -> None:
        self.start = start

    def now(self) -> float:
        """Negative before the start."""
        return time.monotonic() - self.start


Send = Callable[[Clock], Coroutine[Any, Any, Outcome]]
"""Sends one request at once and stamps its answer. Whatever goes wrong is in the outcome, not raised.

Being cancelled, it ends the request on the server as well, and returns what had come by then, as STOPPED.
"""


class Target(Protocol):
    """A server that answers many requests at once. Used within its `async with` block, after `describe`."""

    async def describe(self) -> TargetInfo:
        """Asks what is served. Raises PacelineError where nobody answers."""

    def prepare(self, job: Job, prompt: list[int]) -> Send:
        """A request, made ready ahead of its moment."""

    async def loads(self) -> Loads | None:
        """How full it is; None where it does not say."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...
