"""A prefill worker is lost after it has answered and before everything has landed, against real in-process workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from paceline.errors import EngineLost, NoWorker, PacelineError, WorkerLost
from paceline.protos import decode_pb2
from paceline.services.router.deaths import Deaths
from paceline.testing.router_bench import Asking, RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import (
    DecodeCall,
    PrefillCall,
    ScriptedDecode,
    ScriptedPrefill,
    scripted_decode,
    scripted_prefill,
)
from paceline.types import FinishReason, WorkerKey

P0 = WorkerKey("p0", 1)


class Scene:
    """A router, two prefill workers and a decode worker."""

    def __init__(self, router: RouterBench, prefills: list[ScriptedPrefill], decode: ScriptedDecode) -> None:
        self.router, self.prefills, self.decode = router, prefills, decode

    async def answered(self) -> tuple[Asking, ScriptedPrefill, DecodeCall]:
        """A request whose prefill worker has replied, and whose decode worker has said nothing yet but `reserved`."""
        asking = self.router.ask()
        worker, prefill = await self.next_prefill()
        decode = await self.decode.next_call()
        await decode.reserve()
        await prefill.reply(ids_of("a"))
        assert (await asking.piece()).text == "a"
        return asking, worker, decode

    async def next_prefill(self) -> tuple[ScriptedPrefill, PrefillCall]:
        """The next Prefill call, on whichever worker."""
        while all(worker.idle for worker in self.prefills):  # noqa: ASYNC110  # whichever comes first
            await asyncio.sleep(0.005)
        worker = next(worker for worker in self.prefills if not worker.idle)
        return worker, await worker.next_call()

    def answer(self, answer: decode_pb2.RetargetResponse) -> None:
        """What the decode worker answers to re-targets from now on."""

        async def retarget(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
            return answer

        self.decode.on_retarget = retarget


class Scenes:
    """Makes scenes and ends them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(self, prefill: int = 2, **settings: Any) -> Scene:
        enter = self._stack.enter_async_context
        prefills = [await enter(scripted_prefill(f"p{index}")) for index in range(prefill)]
        decode = await enter(scripted_decode("d0"))
        router = await enter(router_bench(**settings))
        await router.register(*prefills, decode)
        return Scene(router, prefills, decode)


@pytest.fixture
async def scene() -> AsyncIterator[Scenes]:
    async with AsyncExitStack() as stack:
        yield Scenes(stack)


async def test_a_prefill_worker_that_dies_after_its_reply_is_replaced_under_a_new_attempt(scene: Scenes) -> None:
    s = await scene()
    s.answer(decode_pb2.RetargetResponse(attempt=2))
    asking, dead, decode = await s.answered()
    await dead.die()
    retarget = await s.decode.next_retarget()
    assert (retarget.attempt, retarget.to) == (1, decode_pb2.RETARGET_TO_REMOTE)
    other, prefill = await s.next_prefill()
    assert (other is dead, prefill.request.attempt) == (False, 2)
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("ab"))
    await decode.finish(attempts=2)
    finish = await asking.finish()
    assert (asking.text, finish.prefill_worker.worker_id) == ("ab", other.key.worker_id)


async def test_the_next_attempt_is_watched_over_as_the_first_was(scene: Scenes) -> None:
    s = await scene()
    s.answer(decode_pb2.RetargetResponse(attempt=2))
    asking, first, decode = await s.answered()
    await first.die()
    await s.decode.next_retarget()
    second, prefill = await s.next_prefill()
    await prefill.reply(ids_of("a"))
    await s.router.heartbeat(second)  # whose call has returned, so the reply has arrived
    s.answer(decode_pb2.RetargetResponse(local=True))
    await second.die()
    retarget = await s.decode.next_retarget()
    assert (retarget.attempt, retarget.to) == (2, decode_pb2.RETARGET_TO_LOCAL)
    await decode.tokens(0, ids_of("ab"))
    await decode.finish(prompt_tokens_computed=5)
    finish = await asking.finish()
    assert asking.text == "ab"
    assert not finish.HasField("prefill_worker")


async def test_a_prefill_worker_may_die_once_the_decode_worker_has_said_the_first_token(scene: Scenes) -> None:
    s = await scene()
    asking, dead, decode = await s.answered()
    await decode.tokens(0, ids_of("ab"))
    assert (await asking.piece()).text == "b"
    await dead.die()
    await s.router.until(hand_offs_watched=0)
    await decode.finish()
    await asking.finish()
    assert s.decode.retargets.empty()


async def test_what_had_landed_before_the_death_goes_on(scene: Scenes) -> None:
    s = await scene()
    s.answer(decode_pb2.RetargetResponse(already_landed=True))
    asking, dead, decode = await s.answered()
    await dead.die()
    await s.decode.next_retarget()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    finish = await asking.finish()
    assert (asking.text, finish.attempts, finish.prefill_worker.worker_id) == ("ab", 1, dead.key.worker_id)


async def test_where_local_prefill_is_never_the_decode_worker_says_whether_all_had_landed(scene: Scenes) -> None:
    s = await scene(prefill=1, local_prefill="never")
    s.answer(decode_pb2.RetargetResponse(already_landed=True))
    asking, dead, decode = await s.answered()
    await dead.die()
    await s.decode.next_retarget()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "ab"


async def test_a_death_before_the_reservation_is_known_waits_for_it(scene: Scenes) -> None:
    s = await scene()
    s.answer(decode_pb2.RetargetResponse(already_landed=True))
    asking = s.router.ask()
    dead, prefill = await s.next_prefill()
    decode = await s.decode.next_call()
    await prefill.reply(ids_of("a"))
    await asking.piece()
    await dead.die()
    await s.router.until(hand_offs_watched=0)
    assert s.decode.retargets.empty()
    await decode.reserve()
    await s.decode.next_retarget()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()


async def test_a_lost_engine_that_its_front_tells_of_is_heard_by_every_hand_off(scene: Scenes) -> None:
    s = await scene(prefill=1)
    asking, _, decode = await s.answered()
    other = s.router.ask("other")
    _, prefill = await s.next_prefill()
    await (await s.decode.next_call()).reserve()
    await prefill.fail(EngineLost("status -9"))
    told = {(await s.decode.next_retarget()).reservation_id for _ in range(2)}
    assert told == {decode.request.reservation_id, prefill.request.reservation_id}
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    other.cancel()


async def test_a_newer_life_ends_the_hand_offs_of_the_older(scene: Scenes) -> None:
    s = await scene(prefill=1)
    asking, _, decode = await s.answered()
    async with scripted_prefill("p0", epoch=2) as restarted:
        await s.router.register(restarted)
        await s.decode.next_retarget()
        await decode.tokens(0, ids_of("ab"))
        await decode.finish()
        await asking.finish()


@pytest.mark.parametrize("replied", [True, False])
async def test_a_lease_that_ends_moves_the_work_of_a_worker_that_does_not_answer(scene: Scenes, replied: bool) -> None:
    s = await scene(prefill=1, lease_s=0.3, heartbeat_s=0.1)
    asking = s.router.ask()
    dead, prefill = await s.next_prefill()
    decode = await s.decode.next_call()
    await decode.reserve()
    if replied:
        await prefill.reply(ids_of("a"))
        await asking.piece()
    dead.hangs = True
    await s.decode.next_retarget()
    if not replied:
        await prefill.seen_cancelled()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "ab"


async def test_a_lease_that_ends_leaves_the_work_of_a_worker_that_answers(scene: Scenes) -> None:
    s = await scene(prefill=1, lease_s=0.3, heartbeat_s=0.1, queue_timeout_s=0.2)
    asking, _, decode = await s.answered()
    await s.router.until(workers=0)
    assert isinstance(await s.router.ask().error(), NoWorker)
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert s.decode.retargets.empty()


async def test_no_watch_outlives_its_request(scene: Scenes) -> None:
    s = await scene()
    for finish in (FinishReason.STOP, None):
        asking = s.router.ask()
        _, prefill = await s.next_prefill()
        decode = await s.decode.next_call()
        await decode.reserve()
        await prefill.reply(ids_of("a"), finish=finish)
        await asking.piece()
        if finish is None:
            asking.cancel()
        await decode.seen_cancelled()
    await s.router.until(hand_offs_watched=0)


def test_a_death_is_told_once_and_only_to_those_who_watch_that_life() -> None:
    deaths = Deaths()
    heard: list[str] = []
    kept = deaths.watch(P0, lambda error: heard.append(f"kept: {error.message}"))
    deaths.end(deaths.watch(P0, lambda error: heard.append("ended")))
    deaths.watch(WorkerKey("p0", 2), lambda error: heard.append("another life"))
    assert deaths.tell(P0, WorkerLost("gone")) == 1
    assert deaths.tell(P0, WorkerLost("gone again")) == 0
    deaths.end(kept)
    assert heard == ["kept: gone"]
    assert len(deaths) == 1


def test_a_listener_may_end_another_watch_and_begin_one() -> None:
    """A leg that hears of a death moves to another worker, which is to be watched in its turn."""
    deaths = Deaths()
    heard: list[str] = []

    def move(error: PacelineError) -> None:
        heard.append(error.message)
        deaths.watch(P0, move)

    deaths.watch(P0, move)
    assert deaths.tell(P0, WorkerLost("first")) == 1
    assert deaths.tell(P0, WorkerLost("second")) == 1
    assert heard == ["first", "second"]
