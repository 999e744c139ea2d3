from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from paceline.kvtransfer.layout import Fingerprint
from paceline.services.worker.engine_client import EngineClient
from paceline.services.worker.link import FrontLink
from paceline.services.worker.messages import Ready
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
    pid = 7

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(self, *, at_once: bool = False) -> int:
        return 0


class SilentAfterReady:
    def __init__(self) -> None:
        self._words: list[msgspec.Struct] = [READY]

    async def receive(self) -> Any:
        if not self._words:
            await asyncio.Event().wait()
        return self._words.pop()

    def close(self) -> None:
        pass


async def test_an_engine_that_has_reported_nothing_yet_has_its_whole_pool_free() -> None:
    client = EngineClient(
        cast("EngineProcess", LiveProcess()), cast("FrontLink[Any]", SilentAfterReady()), lambda report: None
    )
    assert await client.ready() == READY
    assert (client.load.total_blocks, client.load.free_blocks, client.load.headroom_blocks) == (40, 40, 40)
    await client.stop()
