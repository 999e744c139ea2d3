from __future__ import annotations

import asyncio

from paceline.services.worker.mailbox import Mailbox


async def test_all_that_came_is_taken_at_once_and_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(3):
        mailbox.put(number)
    assert await mailbox.take() == [0, 1, 2]


async def test_a_reader_that_waits_is_woken_by_the_first_and_finds_what_came_with_it() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(1)
    mailbox.put(2)
    async with asyncio.timeout(30):
        assert await reader == [1, 2]


async def test_what_comes_for_a_reader_that_was_cancelled_is_there_for_the_next() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    mailbox.put(1)
    await asyncio.gather(reader, return_exceptions=True)
    assert await mailbox.take() == [1]
