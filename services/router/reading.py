"""A request while its prompt is read: it can be interrupted, and its time runs, as when it is relayed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from paceline.errors import DeadlineExceeded, PacelineError
from paceline.services.router.prompt import Request


class Reading:
    """One request from its arrival to its relay."""

    def __init__(self) -> None:
        self._interruption: PacelineError | None = None
        self._scope: asyncio.Timeout | None = None  # while it runs

    def interrupt(self, error: PacelineError) -> None:
        """Ends the reading with `error`. The first interruption counts."""
        self._interruption = self._interruption or error
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def run(self, read: Awaitable[Request], *, timeout_s: float) -> Request:
        """The request that `read` gives. Raises what it raises, DeadlineExceeded, or the interruption."""
        try:
            async with asyncio.timeout(timeout_s) as self._scope:
                request = await read
        except TimeoutError:
            raise self._interruption or DeadlineExceeded(
                f"the request's {timeout_s:g} s ran out while its prompt was read"
            ) from None
        finally:
            self._scope = None
        if self._interruption is not None:
            raise self._interruption
        return request
