from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigError, Overloaded
from paceline.services.worker.link import EngineLink, FrontLink


class Ask(msgspec.Struct, frozen=True, tag=True):
    number: int


class Tell(msgspec.Struct, frozen=True, tag=True):
    number: int


Ends = tuple[FrontLink[Tell], EngineLink[Ask]]


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    front: FrontLink[Tell] = FrontLink(tmp_path, Tell)
    engine: EngineLink[Ask] = EngineLink(tmp_path, Ask)
    yield front, engine
    engine.close(0)
    front.close()


async def receive(engine: EngineLink[Ask], count: int) -> list[Ask]:
    received: list[Ask] = []
    async with asyncio.timeout(10):
        while len(received) < count:
            received += engine.receive_all()
            await asyncio.sleep(0.001)
    return received


async def test_messages_pass_in_order_both_ways(ends: Ends) -> None:
    front, engine = ends
    for number in range(100):
        front.send(Ask(number))
        engine.send(Tell(number))
    assert await receive(engine, 100) == [Ask(number) for number in range(100)]
    async with asyncio.timeout(10):
        assert [await front.receive() for _ in range(100)] == [Tell(number) for number in range(100)]


async def test_a_sleeping_engine_is_woken_by_a_command(ends: Ends) -> None:
    front, engine = ends
    front.send(Ask(0))
    await receive(engine, 1)
    assert engine.receive_all() == []
    waiting = asyncio.get_running_loop().run_in_executor(
        None, lambda: select.select([engine.file_descriptor], [], [], 10)[0]
    )
    await asyncio.sleep(0.05)
    front.send(Ask(1))
    assert await waiting == [engine.file_descriptor]
    assert await receive(engine, 1) == [Ask(1)]


async def test_a_full_queue_refuses_the_command_and_never_waits(ends: Ends) -> None:
    front, engine = ends
    accepted = 0
    with pytest.raises(Overloaded, match="takes no more"):
        while True:
            front.send(Ask(accepted))
            accepted += 1
    assert [ask.number for ask in await receive(engine, accepted)] == list(range(accepted))


async def test_tokens_wait_in_order_for_a_slow_front(ends: Ends) -> None:
    front, engine = ends
    count = 20_000
    for number in range(count):
        engine.send(Tell(number))
    assert not engine.flush()
    received = []
    async with asyncio.timeout(30):
        while len(received) < count:
            received.append((await front.receive()).number)
            if len(received) % 100 == 0:
                engine.flush()
    assert received == list(range(count))
    assert engine.flush()


async def test_a_folder_too_long_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="run_dir is too long"):
        EngineLink(deep, Ask)


def test_a_socket_that_cannot_be_made_is_told_by_its_name(tmp_path: Path) -> None:
    engine_side = tmp_path / "gone"
    with pytest.raises(
        ConfigError, match=rf"run_dir: {engine_side}/commands cannot be made: No such file or directory"
    ):
        EngineLink(engine_side, Ask)
