"""When a cluster is ready: its router serves, and every worker that was started is registered there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final

from paceline.client import AsyncClient, Health
from paceline.errors import PacelineError

_LOOK_EVERY_S: Final = 0.1
_CALL_S: Final = 2.0

States = Mapping[str, bool]
"""Name of each role, and whether it is ready."""


async def wait_ready(
    address: str,
    workers: Collection[str],
    *,
    router_pid: Callable[[], int | None],
    on_change: Callable[[States], None],
) -> None:
    """Returns when our router at `address` serves and knows all `workers`, by id. Bounded by the caller."""
    seen: States | None = None
    async with AsyncClient(address) as client:
        while True:
            states = await look(client, workers, router_pid())
            if states != seen:
                seen = states
                on_change(states)
            if all(states.values()):
                return
            await asyncio.sleep(_LOOK_EVERY_S)


async def look(client: AsyncClient, workers: Collection[str], router_pid: int | None) -> States:
    """Who is ready right now; nobody where no router answers, or one of another cluster does."""
    states = dict.fromkeys(("router", *workers), False)
    try:
        if (await client.server_info()).process_ids != (router_pid,):
            return states
        states["router"] = await client.health(timeout=_CALL_S) is Health.SERVING
        registered = {worker.key.worker_id for worker in (await client.loads()).workers}
    except PacelineError:
        return states
    return states | {worker: worker in registered for worker in workers}
