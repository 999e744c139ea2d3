"""What may be asked for before it is there: who asks waits until it comes, for so long."""

from __future__ import annotations

import asyncio

from paceline.types import ReservationId


class Arrivals:
    """Callers that wait for reservations. Of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[ReservationId, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Those that wait."""
        return sum(map(len, self._waiting.values()))

    async def wait(self, reservation: ReservationId, limit_s: float) -> None:
        """Returns when it has come, or after `limit_s` seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(reservation, [])
        waiting.append(future)
        try:
            await asyncio.wait({future}, timeout=limit_s)
        finally:
            waiting.remove(future)
            if not waiting:
                self._waiting.pop(reservation, None)

    def came(self, reservation: ReservationId) -> None:
        """Lets those go on that wait for it."""
        for future in self._waiting.get(reservation, ()):
            if not future.done():
                future.set_result(None)
