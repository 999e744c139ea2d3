"""What may be asked for before it is there: who asks waits until it comes, for so long."""

from __future__ import annotations

import asyncio

from paceline.errors import PacelineError
from paceline.types import ReservationId


class Arrivals:
    """Callers that wait for reservations. Of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[ReservationId, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Those that wait."""
        return sum(map(len, self._waiting.values()))

    async def wait(self, reservation: ReservationId, limit_s: float) -> None:
        """Returns when it has come, or after `limit_s` seconds. Raises what `fail_all` says."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(reservation, [])
        waiting.append(future)
        try:
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                future.result()
        finally:
            waiting.remove(future)
            if not waiting:
                self._waiting.pop(reservation, None)

    def came(self, reservation: ReservationId) -> None:
        """Lets those go on that wait for it."""
        for future in self._waiting.get(reservation, ()):
            if not future.done():
                future.set_result(None)

    def fail_all(self, error: PacelineError) -> None:
        """Ends every wait with the error."""
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
