from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from paceline.kvtransfer.layout import Fingerprint
from paceline.services.worker import engine_client
from paceline.services.worker.engine_client import EngineClient, Loss
from paceline.services.worker.link import FrontLink
from paceline.services.worker.messages import Alive, Ready
from paceline.services.worker.process import EngineProcess
from paceline.types import Limits

READY = Ready(
    limits=Limits(vocab_size=100, context_tokens=64, pool_blocks=40),
    fingerprint=Fingerprint(
        format_version=1,
        model="m",
        weights_digest="d",
        dtype="float32",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=16,
    ),
    eos_token_ids=(2,),
    transport="nixl",
)


class LiveProcess:
    """Standing still, and out of a kill's reach."""

    pid = 7
    cpu_s = 0.0
    killed = False

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(self, *, at_once: bool = False) -> int:
        return 0


class Mortal(LiveProcess):
    """Standing still until it is killed."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return -9

    def kill(self) -> None:
        self._ended.set()


class SilentAfterReady:
    def __init__(self, *, answers: bool = False) -> None:
        self._words: list[msgspec.Struct] = [READY]
        self._answers = answers
        self._asked = asyncio.Event()

    def send(self, command: msgspec.Struct) -> None:
        self._asked.set()

    async def receive(self) -> Any:
        if self._words:
            return self._words.pop()
        await (self._asked if self._answers else asyncio.Event()).wait()
        self._asked.clear()
        return Alive()

    def close(self) -> None:
        pass


def client_of(process: LiveProcess, link: SilentAfterReady, *, stall_s: float | None = None) -> EngineClient:
    return EngineClient(
        cast("EngineProcess", process), cast("FrontLink[Any]", link), lambda report: None, stall_s=stall_s
    )


async def test_an_engine_that_has_reported_nothing_yet_has_its_whole_pool_free() -> None:
    client = client_of(LiveProcess(), SilentAfterReady())
    assert await client.ready() == READY
    assert (client.load.total_blocks, client.load.free_blocks, client.load.headroom_blocks) == (40, 40, 40)
    await client.stop()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other in milliseconds."""
    monkeypatch.setattr(engine_client, "PING_S", 0.01)
    monkeypatch.setattr(engine_client, "_REAP_S", 0.05)


@pytest.mark.usefixtures("hasty")
async def test_an_engine_that_stands_still_is_killed_and_reaped() -> None:
    client = client_of(Mortal(), SilentAfterReady(), stall_s=0.05)
    await client.ready()
    async with asyncio.timeout(30.0):
        loss = await client.lost()
    assert loss == Loss("gave no sign of life for 0 s, and was killed", reaped=True)
    await client.stop()


@pytest.mark.usefixtures("hasty")
async def test_one_that_a_kill_does_not_reach_is_lost_and_not_proven_dead() -> None:
    process = LiveProcess()
    client = client_of(process, SilentAfterReady(), stall_s=0.05)
    await client.ready()
    async with asyncio.timeout(30.0):
        loss = await client.lost()
    assert process.killed and not loss.reaped
    await client.stop()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("answers", "stall_s"), [(True, 0.2), (False, None)])
async def test_an_engine_that_answers_in_the_middle_of_a_step_or_may_stand_still_is_not_lost(
    answers: bool, stall_s: float | None
) -> None:
    client = client_of(LiveProcess(), SilentAfterReady(answers=answers), stall_s=stall_s)
    await client.ready()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await client.lost()
    await client.stop()


async def test_an_engine_that_ends_by_itself_is_lost_with_its_status() -> None:
    process = Mortal()
    client = client_of(process, SilentAfterReady(), stall_s=60.0)
    await client.ready()
    process.kill()
    assert await client.lost() == Loss("ended with status -9", reaped=True)
    await client.stop()
