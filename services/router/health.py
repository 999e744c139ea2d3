"""The router's `grpc.health.v1`: whether it could place a request, and apart from that whether its process is there.

The empty name and `paceline.v1.Router` are readiness: SERVING while a request could be placed, though it may have to
wait for room. `paceline.liveness` is SERVING from the start to the end of the process: a router without workers, or one
that finishes what it has, must not be restarted for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from grpc_health.v1 import health, health_pb2

from paceline import wire
from paceline.log import get_logger

_log = get_logger(__name__)

LOOK_S: Final = 1.0
"""Time between two looks, in seconds, whatever happens: an engine comes to stand still by the age of its last report,
without an event."""

_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class RouterHealth:
    """The servicer, kept true by a task that sleeps until `look` finds a change, `LOOK_S` at most.

    Made by `begin`; `close` it once.
    """

    def __init__(self, service: str, obstacle: Callable[[], str | None]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", service)
        self._obstacle = obstacle
        self._serving = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None]

    @classmethod
    async def begin(cls, service: str, obstacle: Callable[[], str | None]) -> RouterHealth:
        """One for a router that cannot place a request yet. `obstacle` says why none can be placed, or None."""
        begun = cls(service, obstacle)
        await begun._set(serving=False)
        await begun.servicer.set(wire.LIVENESS, _STATUS[True])
        begun._task = asyncio.create_task(begun._follow(), name="health")
        return begun

    def look(self) -> None:
        """To be called whenever the obstacle may have come or gone. Quick: every heart-beat does."""
        if (self._obstacle() is None) is not self._serving:
            self._changed.set()

    async def end(self) -> None:
        """Not ready any more, for good: the router takes nothing new. Its process is alive still."""
        await self.close()
        await self._set(serving=False)

    async def close(self) -> None:
        """Stops following."""
        self._task.cancel()
        await asyncio.wait({self._task})  # which, unlike a suppressed await, does not swallow our own cancellation

    async def _follow(self) -> None:
        while True:
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with what is waited for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            obstacle = self._obstacle()
            if (obstacle is None) is self._serving:
                continue  # it was for a moment
            if obstacle is None:
                _log.info("requests can be placed")
            else:
                _log.warning("no request can be placed", why=obstacle)
            await self._set(serving=obstacle is None)

    async def _set(self, *, serving: bool) -> None:
        self._serving = serving
        for name in self._names:
            await self.servicer.set(name, _STATUS[serving])
