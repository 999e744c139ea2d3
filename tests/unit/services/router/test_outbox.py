"""What waits to be written to a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from paceline.errors import Overloaded
from paceline.services.router.answer import Piece
from paceline.services.router.outbox import Outbox


def piece(index: int, *ids: int) -> Piece:
    return Piece(text="x" * len(ids), token_ids=ids, index=index)


@asynccontextmanager
async def writing(
    write: Callable[[Piece], Awaitable[None]], *, max_tokens: int = 10, write_timeout_s: float = 10.0
) -> AsyncIterator[tuple[Outbox, list[Overloaded]]]:
    stuck: list[Overloaded] = []
    outbox = Outbox(write, max_tokens=max_tokens, on_stuck=stuck.append, write_timeout_s=write_timeout_s)
    writer = asyncio.create_task(outbox.run())
    try:
        yield outbox, stuck
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


async def test_pieces_are_written_in_order_and_those_that_pile_up_as_one() -> None:
    written: list[Piece] = []
    gate = asyncio.Event()

    async def write(piece: Piece) -> None:
        written.append(piece)
        await gate.wait()

    async with writing(write) as (outbox, _):
        outbox.put(piece(0, 5))
        await asyncio.sleep(0)
        outbox.put(piece(1, 6, 7))
        outbox.put(piece(3, 8))
        gate.set()
        await outbox.flush()
    assert written == [piece(0, 5), piece(1, 6, 7, 8)]


async def test_flush_returns_once_everything_is_written() -> None:
    gate = asyncio.Event()

    async def write(_piece: Piece) -> None:
        await gate.wait()

    async with writing(write) as (outbox, _):
        await outbox.flush()
        outbox.put(piece(0, 5))
        flushing = asyncio.create_task(outbox.flush())
        await asyncio.sleep(0.01)
        assert not flushing.done()
        gate.set()
        await flushing


async def test_a_client_too_many_tokens_behind_is_overloaded() -> None:
    async def write(_piece: Piece) -> None:
        await asyncio.Event().wait()

    async with writing(write, max_tokens=3) as (outbox, _):
        outbox.put(piece(0, 1, 2))
        await asyncio.sleep(0)
        outbox.put(piece(2, 3))  # the write in progress counts until it is done
        with pytest.raises(Overloaded, match="4 tokens wait to be written, over the limit of 3"):
            outbox.put(piece(3, 4))


async def test_a_write_that_takes_too_long_is_told_once() -> None:
    async def write(_piece: Piece) -> None:
        await asyncio.Event().wait()

    async with writing(write, write_timeout_s=0.02) as (outbox, stuck):
        outbox.put(piece(0, 1))
        await asyncio.sleep(0.1)
        [error] = stuck
        assert "a write took over 0.02 s" in error.message


async def test_the_limit_is_each_writes_own() -> None:
    async def write(_piece: Piece) -> None:
        await asyncio.sleep(0.05)

    async with writing(write, write_timeout_s=0.4) as (outbox, stuck):
        for index in range(12):
            outbox.put(piece(index, 1))
            await outbox.flush()
        assert not stuck


async def test_a_write_that_is_stuck_after_others_went_well_is_found() -> None:
    async def write(piece: Piece) -> None:
        if piece.index:
            await asyncio.Event().wait()

    async with writing(write, write_timeout_s=0.05) as (outbox, stuck):
        outbox.put(piece(0, 1))
        await outbox.flush()
        await asyncio.sleep(0.12)  # the client is idle for longer than a write may take
        assert not stuck
        outbox.put(piece(1, 2))
        async with asyncio.timeout(10):
            while not stuck:  # noqa: ASYNC110 - `on_stuck` is a plain call
                await asyncio.sleep(0.01)
