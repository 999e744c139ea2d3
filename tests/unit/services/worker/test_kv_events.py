"""Who follows a worker's prefix cache: a snapshot, every change after it, and no buffering for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.errors import Overloaded
from paceline.prefix import KvRemoved, KvStored, block_hashes
from paceline.protos import common_pb2
from paceline.services.worker.kv_events import KvEvents
from paceline.types import BLOCK_TOKENS

A, B, C, D = block_hashes(list(range(4 * BLOCK_TOKENS)))


class Follower:
    """Keeps what a router would: hashes with their parents."""

    def __init__(self, events: KvEvents) -> None:
        self.stream: AsyncIterator[common_pb2.KvEvent] = events.subscribe()
        self.held: dict[bytes, bytes] = {}
        self.sequence = 0

    async def read(self, count: int) -> None:
        for _ in range(count):
            async with asyncio.timeout(10):
                event = await anext(self.stream)
            match event.WhichOneof("event"):
                case "cleared":
                    self.held.clear()
                case "stored":
                    parent = event.stored.parent_hash
                    for each in event.stored.hashes:
                        self.held[each] = parent
                        parent = each
                case "removed":
                    for each in event.removed.hashes:
                        del self.held[each]
            assert event.sequence - self.sequence in (0, 1) or event.HasField("cleared")
            self.sequence = event.sequence


async def test_an_empty_cache_begins_with_cleared() -> None:
    follower = Follower(KvEvents())
    await follower.read(1)
    assert (follower.held, follower.sequence) == ({}, 0)


async def test_a_snapshot_is_followed_by_every_change() -> None:
    events = KvEvents()
    events.take([KvStored(None, (A, B)), KvStored(B, (C,)), KvRemoved((C,))])
    follower = Follower(events)
    await follower.read(2)
    assert (follower.held, follower.sequence) == ({A: b"", B: A}, 3)
    events.take([KvStored(B, (C, D))])
    events.take([KvRemoved((D,)), KvRemoved((A,))])
    await follower.read(3)
    assert (follower.held, follower.sequence) == ({B: A, C: B}, 6)


async def test_a_later_follower_sees_the_same_as_an_earlier_one() -> None:
    events = KvEvents()
    first = Follower(events)
    await first.read(1)
    events.take([KvStored(None, (A, B, C)), KvRemoved((B,)), KvStored(A, (B,))])
    await first.read(3)
    later = Follower(events)
    while later.sequence != first.sequence or later.held != first.held:
        await later.read(1)
    assert later.held == {A: b"", B: A, C: B}
    assert events.followers == 2


async def test_a_change_between_snapshot_and_first_read_is_not_lost() -> None:
    events = KvEvents()
    events.take([KvStored(None, (A,))])
    follower = Follower(events)
    await follower.read(1)  # in the middle of the snapshot
    events.take([KvStored(A, (B,))])
    await follower.read(2)
    assert (follower.held, follower.sequence) == ({A: b"", B: A}, 2)


async def test_a_follower_that_does_not_read_is_cut_off_and_the_others_go_on() -> None:
    events = KvEvents(waiting=8)
    slow, quick = Follower(events), Follower(events)
    await slow.read(1)
    await quick.read(1)
    for number in range(9):
        events.take([KvStored(None, (A,)) if number % 2 == 0 else KvRemoved((A,))])
        await quick.read(1)
    assert events.followers == 1
    with pytest.raises(Overloaded, match="8 behind"):
        await slow.read(1)
    assert quick.held == {A: b""}


async def test_a_follower_that_leaves_is_forgotten() -> None:
    events = KvEvents()
    follower = Follower(events)
    await follower.read(1)
    await follower.stream.aclose()
    assert events.followers == 0
    events.take([KvStored(None, (A,))])
    assert len(events) == 1


async def test_a_long_chain_comes_in_several_events() -> None:
    hashes = block_hashes(list(range(5_000 * BLOCK_TOKENS)))
    events = KvEvents()
    events.take([KvStored(None, tuple(hashes))])
    follower = Follower(events)
    await follower.read(3)
    assert list(follower.held) == hashes
    assert follower.held[hashes[4_096]] == hashes[4_095]
