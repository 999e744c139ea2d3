"""Many requests at once through workers that misbehave at random: every request ends once, and nothing is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from paceline.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    PacelineError,
    RequestCancelled,
    StaleEpoch,
    TransferFailed,
    UnknownReservation,
    WorkerLost,
    WrongAttempt,
)
from paceline.protos import decode_pb2
from paceline.testing.router_bench import Asking, RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import (
    DecodeCall,
    PrefillCall,
    ScriptedDecode,
    ScriptedPrefill,
    scripted_decode,
    scripted_prefill,
)
from paceline.types import FinishReason

ANSWER = ids_of("abcdefgh")
ERRORS: list[PacelineError] = [
    Overloaded("full", retry_after_s=0.01),
    WorkerLost("gone"),
    StaleEpoch("restarted"),
    Draining("draining"),
    TransferFailed("broke"),
    RequestCancelled("aborted"),
    InvalidRequest("prompt", "is odd"),
]


class Storm:
    """Workers and clients with dice of their own."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pause(self) -> None:
        await asyncio.sleep(self.dice.choice([0, 0, 0.001, 0.01]))

    async def prefills(self, worker: ScriptedPrefill) -> None:
        while True:
            self.start(self._prefill(await worker.calls.get()))

    async def _prefill(self, call: PrefillCall) -> None:
        await self.pause()
        if self.dice.random() < 0.3:
            await call.fail(self.dice.choice(ERRORS))
        elif self.dice.random() < 0.9:
            await call.reply(ANSWER[:1], finish=FinishReason.STOP if self.dice.random() < 0.2 else None)

    async def decodes(self, worker: ScriptedDecode) -> None:
        worker.on_retarget = self._retarget
        while True:
            self.start(self._decode(await worker.calls.get()))

    async def _decode(self, call: DecodeCall) -> None:
        await self.pause()
        if self.dice.random() < 0.15:
            return await call.fail(self.dice.choice(ERRORS))
        await call.reserve()
        if self.dice.random() < 0.2:
            await call.retargeted(self.dice.choice([None, 2]))
        sent = 0
        while sent < len(ANSWER):
            await self.pause()
            if self.dice.random() < 0.05:
                return await call.fail(self.dice.choice(ERRORS))
            start, sent = self.dice.randint(0, sent), self.dice.randint(sent, len(ANSWER))
            await call.tokens(start, ANSWER[start:sent])
        if self.dice.random() < 0.05:
            return await call.end()
        return await call.finish()

    async def _retarget(self, request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        await self.pause()
        match self.dice.randrange(5):
            case 0:
                return decode_pb2.RetargetResponse(already_landed=True)
            case 1:
                raise WrongAttempt("another is current")
            case 2:
                raise UnknownReservation("ended")
            case 3 if request.to == decode_pb2.RETARGET_TO_REMOTE:
                return decode_pb2.RetargetResponse(attempt=request.attempt + 1)
            case _:
                return decode_pb2.RetargetResponse(local=True)

    async def client(self, router: RouterBench) -> str:
        await asyncio.sleep(self.dice.random() * 0.2)
        asking = router.ask(timeout_s=self.dice.choice([0.05, 2.0, 5.0]))
        if self.dice.random() < 0.15:
            await self.pause()
            asking.cancel()
            return "cancelled"
        return await self._read(asking)

    async def _read(self, asking: Asking) -> str:
        try:
            await asking.finish()
            outcome = "served"
        except PacelineError as error:
            outcome = error.reason
        assert asking.token_ids == ANSWER[: len(asking.token_ids)]
        assert asking.text == "abcdefgh"[: len(asking.text)]
        return outcome


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_workers_do_every_request_ends_and_no_claim_is_left(seed: int) -> None:
    storm = Storm(seed)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefills = [await enter(scripted_prefill(f"p{index}")) for index in range(2)]
        decodes = [await enter(scripted_decode(f"d{index}")) for index in range(2)]
        router = await enter(router_bench(prefill_slots=4, queue_timeout_s=5.0))
        await router.register(*prefills, *decodes)
        for prefill in prefills:
            storm.start(storm.prefills(prefill))
        for decode in decodes:
            storm.start(storm.decodes(decode))
        storm.start(_beat(router, *prefills, *decodes))
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*(storm.client(router) for _ in range(80)))
        assert "served" in outcomes
        await router.until(active=0, queued=0)
        assert router.claims() == 0
        for task in list(storm.tasks):
            task.cancel()
        await asyncio.gather(*storm.tasks, return_exceptions=True)


async def _beat(router: RouterBench, *workers: ScriptedPrefill | ScriptedDecode) -> None:
    while True:
        for worker in workers:
            await router.heartbeat(worker)
        await asyncio.sleep(0.02)
