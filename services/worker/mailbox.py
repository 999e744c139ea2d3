"""What has come for one call and was not looked at yet."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items in the order in which they came, for one reader, which takes all that are there at once.

    A queue would hand them out one by one; who takes all sees what can be told in one message.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._came: asyncio.Future[None] | None = None  # while the reader waits

    def put(self, item: Item) -> None:
        """Adds an item. Never waits."""
        self._items.append(item)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def take(self) -> list[Item]:
        """All items, at least one; waits only for the first."""
        while not self._items:
            self._came = asyncio.get_running_loop().create_future()
            try:
                await self._came
            finally:
                self._came = None
        items, self._items = self._items, []
        return items
