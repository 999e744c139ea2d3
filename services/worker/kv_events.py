"""What a worker's prefix cache holds, as its front knows it, and those who follow its changes.

A follower gets a snapshot and then every change, or is cut off: one that does not read is not buffered for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from paceline.errors import Overloaded
from paceline.prefix import BlockHash, KvChange, KvRemoved, KvStored
from paceline.protos import common_pb2

_WAITING_EVENTS: Final = 1024
"""Events that a follower may be behind: seconds of a busy worker's."""
_SNAPSHOT_HASHES: Final = 4096
"""Hashes in one event of a snapshot at most: 64 KiB."""


class KvEvents:
    """The cache of one life of a worker, rebuilt from its engine's reports, with its followers."""

    def __init__(self, *, waiting: int = _WAITING_EVENTS) -> None:
        """`waiting` is how many events a follower may be behind."""
        self._waiting = waiting
        self._parent_of: dict[BlockHash, BlockHash | None] = {}  # what is there, in the order of its coming
        self._sequence = 0
        self._followers: set[asyncio.Queue[common_pb2.KvEvent | None]] = set()

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._parent_of)

    @property
    def followers(self) -> int:
        """Streams that are open."""
        return len(self._followers)

    def take(self, changes: Iterable[KvChange]) -> None:
        """Takes in an engine's changes, in order, and passes them on."""
        for change in changes:
            self._sequence += 1
            match change:
                case KvStored(parent=parent, hashes=hashes):
                    for each in hashes:
                        self._parent_of[each] = parent
                        parent = each
                case KvRemoved(hashes=hashes):
                    for each in hashes:
                        self._parent_of.pop(each, None)
            if self._followers:
                self._tell(_to_proto(change, self._sequence))

    async def subscribe(self) -> AsyncIterator[common_pb2.KvEvent]:
        """The snapshot, then the changes, without end. Raises Overloaded where the follower falls too far behind."""
        queue: asyncio.Queue[common_pb2.KvEvent | None] = asyncio.Queue(self._waiting + 1)
        snapshot = list(self._snapshot())  # before anything else can happen
        self._followers.add(queue)
        try:
            for event in snapshot:
                yield event
            while (change := await queue.get()) is not None:
                yield change
        finally:
            self._followers.discard(queue)
        raise Overloaded(f"this follower of KV events was {self._waiting} behind: begin anew", retry_after_s=1.0)

    def _tell(self, event: common_pb2.KvEvent) -> None:
        for queue in list(self._followers):
            if queue.qsize() < self._waiting:
                queue.put_nowait(event)
            else:
                self._followers.discard(queue)
                while not queue.empty():  # what it missed makes the rest worthless
                    queue.get_nowait()
                queue.put_nowait(None)

    def _snapshot(self) -> Iterator[common_pb2.KvEvent]:
        yield common_pb2.KvEvent(sequence=self._sequence, cleared=common_pb2.KvCacheCleared())
        start: BlockHash | None = None
        chain: list[BlockHash] = []
        for each, parent in self._parent_of.items():
            if chain and (parent != chain[-1] or len(chain) == _SNAPSHOT_HASHES):
                yield _to_proto(KvStored(start, tuple(chain)), self._sequence)
                chain = []
            if not chain:
                start = parent
            chain.append(each)
        if chain:
            yield _to_proto(KvStored(start, tuple(chain)), self._sequence)


def _to_proto(change: KvChange, sequence: int) -> common_pb2.KvEvent:
    match change:
        case KvStored(parent=parent, hashes=hashes):
            stored = common_pb2.KvBlocksStored(parent_hash=parent or b"", hashes=hashes)
            return common_pb2.KvEvent(sequence=sequence, stored=stored)
        case KvRemoved(hashes=hashes):
            return common_pb2.KvEvent(sequence=sequence, removed=common_pb2.KvBlocksRemoved(hashes=hashes))
