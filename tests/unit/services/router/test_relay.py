"""The relay of a request, against real in-process gRPC workers that do what each test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
import pytest

from paceline.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    FingerprintMismatch,
    InvalidRequest,
    NoWorker,
    NumericalError,
    Overloaded,
    PromptTooLong,
    RequestCancelled,
    SlowTransport,
    StaleEpoch,
    TransferFailed,
    WorkerLost,
    WrongAttempt,
)
from paceline.protos import common_pb2, decode_pb2
from paceline.services.router import calls, leg
from paceline.services.router.outbox import Outbox
from paceline.testing.router_bench import RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import (
    OnRetarget,
    ScriptedDecode,
    ScriptedPrefill,
    scripted_decode,
    scripted_prefill,
)
from paceline.types import FinishReason, Limits, ReservationId, WorkerLoad

W = TypeVar("W", ScriptedPrefill, ScriptedDecode)


class Cluster:
    """A router with workers."""

    def __init__(self, router: RouterBench, prefills: list[ScriptedPrefill], decodes: list[ScriptedDecode]) -> None:
        self.router = router
        self.prefills = prefills
        self.decodes = decodes

    @property
    def prefill(self) -> ScriptedPrefill:
        return self.prefills[0]

    @property
    def decode(self) -> ScriptedDecode:
        return self.decodes[0]

    def other(self, worker: ScriptedPrefill) -> ScriptedPrefill:
        return next(other for other in self.prefills if other is not worker)


class Clusters:
    """Makes clusters and closes them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(self, prefill: int = 1, decode: int = 1, **settings: Any) -> Cluster:
        enter = self._stack.enter_async_context
        prefills = [await enter(scripted_prefill(f"p{index}")) for index in range(prefill)]
        decodes = [await enter(scripted_decode(f"d{index}")) for index in range(decode)]
        router = await enter(router_bench(**settings))
        await router.register(*prefills, *decodes)
        return Cluster(router, prefills, decodes)


@pytest.fixture
async def cluster() -> AsyncIterator[Clusters]:
    async with AsyncExitStack() as stack:
        yield Clusters(stack)


async def test_both_workers_are_called_at_once_and_the_answer_is_merged(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask("hello")
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    assert list(prefill.request.prompt) == list(decode.request.prompt) == ids_of("hello")
    assert prefill.request.reservation_id == decode.request.reservation_id
    assert prefill.request.decode.address == c.decode.address
    assert (prefill.request.attempt, decode.request.local) == (1, False)
    assert prefill.request.sampling.seed == decode.request.sampling.seed
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("a"))
    await decode.tokens(1, ids_of("bc"))
    await decode.finish()
    finish = await asking.finish()
    assert (asking.text, asking.token_ids) == ("abc", ids_of("abc"))
    assert finish.reason == common_pb2.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (5, 3)
    assert (finish.prefill_worker.worker_id, finish.decode_worker.worker_id) == ("p0", "d0")
    assert (finish.transfer.blocks, finish.transfer.parts, finish.attempts) == (3, 2, 1)
    assert finish.transfer.parts_before_last_chunk == 1
    assert finish.timings.prefill.nanos == 250_000_000
    assert finish.timings.transfer.nanos == 500_000_000
    assert not decode.cancelled.is_set()


async def test_the_first_token_does_not_wait_for_the_decode_worker(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    assert (await asking.piece()).text == "a"
    await decode.tokens(0, ids_of("ab"))
    assert (await asking.piece()).text == "b"
    await decode.finish()
    await asking.finish()


async def test_a_request_that_its_first_token_ends_never_lands(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask(max_tokens=1)
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"), finish=FinishReason.LENGTH)
    finish = await asking.finish()
    assert (asking.text, finish.usage.completion_tokens) == ("a", 1)
    assert finish.HasField("prefill_worker") and not finish.HasField("decode_worker")
    await decode.seen_cancelled()


async def test_an_end_of_sequence_token_is_counted_and_is_no_text(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, [*ids_of("ab"), 2])
    await decode.finish(FinishReason.STOP)
    finish = await asking.finish()
    assert (asking.text, asking.token_ids) == ("ab", [*ids_of("ab"), 2])
    assert finish.usage.completion_tokens == 3
    assert not finish.HasField("stop_text")


async def test_duplicate_and_reordered_tokens_reach_the_client_once_and_in_order(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.tokens(2, ids_of("cd"))
    await decode.tokens(0, ids_of("ab"))
    await decode.tokens(1, ids_of("bcde"))
    await decode.finish()
    await asking.finish()
    assert (asking.text, asking.token_ids) == ("abcde", ids_of("abcde"))
    await prefill.seen_cancelled()


async def test_a_token_that_contradicts_the_answer_ends_it(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await asking.piece()
    await decode.tokens(0, ids_of("x"))
    assert isinstance(await asking.error(), WorkerLost)
    await decode.seen_cancelled()


async def test_a_finish_before_all_its_tokens_is_an_error(cluster: Clusters) -> None:
    c = await cluster(prefill=0)
    asking = c.router.ask()
    decode = await c.decode.next_call()
    await decode.reserve()
    await decode.tokens(1, ids_of("b"))
    await decode.finish()
    assert "token 0 of it never came" in (await asking.error()).message


# ---- refusals --------------------------------------------------------------------------------------------------------


async def test_a_refusal_cancels_prefill_and_the_request_waits_for_room(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.fail(Overloaded("no blocks", retry_after_s=5.0))
    await prefill.seen_cancelled()
    await c.router.until(queued=1)
    await c.router.heartbeat(c.decode)
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


async def test_a_refused_request_keeps_its_place_before_later_ones(cluster: Clusters) -> None:
    c = await cluster(prefill=0)
    first = c.router.ask("first")
    decode = await c.decode.next_call()
    c.decode.load = WorkerLoad(total_blocks=128, free_blocks=0, committed_blocks=128)
    await c.router.heartbeat(c.decode)
    second = c.router.ask("second")
    await c.router.until(queued=1)
    await decode.fail(Overloaded("no blocks", retry_after_s=5.0))
    await c.router.until(queued=2)
    c.decode.load = WorkerLoad(total_blocks=128, free_blocks=128)
    await c.router.heartbeat(c.decode)
    for asking, text in ((first, "first"), (second, "second")):
        decode = await c.decode.next_call()
        assert list(decode.request.prompt) == ids_of(text)
        await decode.reserve()
        await decode.tokens(0, ids_of("a"))
        await decode.finish()
        await asking.finish()


async def test_a_full_prefill_worker_sends_the_request_back_to_the_queue(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(Overloaded("full", retry_after_s=5.0))
    await decode.seen_cancelled()
    await c.router.until(queued=1)
    assert c.decode.retargets.empty()
    await c.router.heartbeat(c.prefill)
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


@pytest.mark.parametrize("error", [StaleEpoch("restarted"), Draining("draining"), WorkerLost("gone")])
async def test_a_decode_worker_lost_before_the_first_token_is_replaced_once(
    cluster: Clusters, error: Draining | StaleEpoch | WorkerLost
) -> None:
    c = await cluster(prefill=1, decode=2)
    asking = c.router.ask()
    await c.prefill.next_call()
    first = await _busy(c.decodes)
    await (await first.next_call()).fail(error)
    prefill = await c.prefill.next_call()
    second = next(decode for decode in c.decodes if decode is not first)
    await (await second.next_call()).fail(error)
    assert isinstance(await asking.error(), WorkerLost)
    await prefill.seen_cancelled()


async def test_an_invalid_request_at_a_worker_is_told_to_the_client(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.fail(InvalidRequest("prompt", "is odd"))
    assert (await asking.error()).message == "prompt: is odd"
    await prefill.seen_cancelled()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await prefill.fail(InvalidRequest("prompt", "is odd"))
    assert isinstance(await asking.error(), InvalidRequest)
    await decode.seen_cancelled()


async def test_a_numerical_error_is_told_and_not_tried_again(cluster: Clusters) -> None:
    c = await cluster(decode=2)
    asking = c.router.ask()
    await c.prefill.next_call()
    first = await _busy(c.decodes)
    decode = await first.next_call()
    await decode.reserve()
    await decode.fail(NumericalError("NaN in row 3"))
    assert isinstance(await asking.error(), NumericalError)
    assert all(worker.idle for worker in c.decodes)


async def test_a_refusal_after_prefills_first_token_is_placed_again_unseen(cluster: Clusters) -> None:
    c = await cluster(decode=2)
    asking = c.router.ask()
    prefill, first = await c.prefill.next_call(), await _busy(c.decodes)
    await prefill.reply(ids_of("a"))
    assert (await asking.piece()).text == "a"
    await (await first.next_call()).fail(Overloaded("no blocks", retry_after_s=5.0))
    prefill = await c.prefill.next_call()
    decode = await next(decode for decode in c.decodes if decode is not first).next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "ab"


async def test_a_prompt_that_lost_its_blocks_after_the_first_token_is_placed_again_unseen(cluster: Clusters) -> None:
    """A prefill worker died after its reply, and the decode worker has no blocks left for another attempt."""
    c = await cluster(decode=2)
    asking = c.router.ask()
    prefill, first = await c.prefill.next_call(), await _busy(c.decodes)
    decode = await first.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    assert (await asking.piece()).text == "a"
    await decode.fail(Overloaded("no blocks for another attempt", retry_after_s=1.0))
    prefill = await c.prefill.next_call()
    decode = await next(each for each in c.decodes if each is not first).next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "ab"


async def test_a_decode_worker_that_neither_reserves_nor_refuses_is_lost(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg, "_RESERVE_S", 0.2)
    c = await cluster(decode=2)
    asking = c.router.ask()
    first = await _busy(c.decodes)
    prefill, silent = await c.prefill.next_call(), await first.next_call()
    await prefill.reply(ids_of("a"))
    await silent.seen_cancelled()
    decode = await next(decode for decode in c.decodes if decode is not first).next_call()
    await decode.reserve()
    await asyncio.sleep(0.3)  # a reservation ends the wait
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "ab"


# ---- time-outs and defects inside ------------------------------------------------------------------------------------


async def test_a_prefill_workers_own_time_out_is_not_the_clients(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(DeadlineExceeded("a claim took too long"))
    assert (await c.decode.next_retarget()).to == decode_pb2.RETARGET_TO_LOCAL
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()


@pytest.mark.parametrize("delivered", [True, False])
async def test_a_retarget_that_is_not_answered_in_time_is_a_lost_worker(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, delivered: bool
) -> None:
    monkeypatch.setattr(calls, "RETARGET_TIMEOUT_S", 0.2)
    c = await cluster(queue_timeout_s=0.2)

    async def never(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    c.decode.on_retarget = never
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    if delivered:
        await decode.tokens(0, ids_of("a"))
        await asking.piece()
    await prefill.fail(TransferFailed("the write broke"))
    error = await asking.error()
    # Nobody else could take it, and the one that did not answer gets nothing before its next sign of life.
    assert isinstance(error, WorkerLost if delivered else NoWorker)
    await decode.seen_cancelled()


async def test_a_decode_workers_own_time_out_is_not_the_clients(cluster: Clusters) -> None:
    c = await cluster(prefill=0)
    asking = c.router.ask()
    decode = await c.decode.next_call()
    await decode.reserve()
    await decode.tokens(0, ids_of("a"))
    await asking.piece()
    await decode.fail(DeadlineExceeded("a peer took too long"))
    assert isinstance(await asking.error(), WorkerLost)


async def test_a_bound_on_a_control_call_speaks_of_the_worker(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "RETARGET_TIMEOUT_S", 0.1)
    c = await cluster()

    async def never(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    c.decode.on_retarget = never
    [client] = [client for client in c.router.server.fleet._clients.values() if client.info.key == c.decode.key]
    with pytest.raises(WorkerLost, match="decode worker d0@1 did not answer in time"):
        await client.retarget(ReservationId("r"), attempt=1, local=True)


async def test_a_writer_that_breaks_ends_the_request(cluster: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_outbox: Outbox) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Outbox, "run", broken)
    c = await cluster()
    error = await c.router.ask().error()
    assert isinstance(error, EngineError) and "ZeroDivisionError" in error.message


@pytest.mark.parametrize("method", ["generate", "prefill"])
async def test_a_defect_in_a_call_ends_the_request(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_arguments: Any, **_settings: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(calls.WorkerClient, method, broken)
    c = await cluster()
    error = await c.router.ask().error()
    assert isinstance(error, EngineError) and "ZeroDivisionError" in error.message


# ---- a prefill worker fails ------------------------------------------------------------------------------------------


async def test_a_lost_prefill_worker_is_replaced_under_a_new_attempt(cluster: Clusters) -> None:
    c = await cluster(prefill=2)
    c.decode.on_retarget = _answer(decode_pb2.RetargetResponse(attempt=2))
    asking = c.router.ask()
    first = await _busy(c.prefills)
    prefill, decode = await first.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(TransferFailed("the write broke"))
    prefill = await c.other(first).next_call()
    assert prefill.request.attempt == 2
    assert prefill.request.reservation_id == decode.request.reservation_id
    retarget = await c.decode.next_retarget()
    assert (retarget.attempt, retarget.to) == (1, decode_pb2.RETARGET_TO_REMOTE)
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("ab"))
    await decode.finish(attempts=2)
    finish = await asking.finish()
    assert (asking.text, finish.attempts) == ("ab", 2)
    assert finish.prefill_worker.worker_id == c.other(first).key.worker_id


async def test_a_prefill_worker_that_dies_is_replaced(cluster: Clusters) -> None:
    c = await cluster(prefill=2)
    c.decode.on_retarget = _answer(decode_pb2.RetargetResponse(attempt=2))
    asking = c.router.ask()
    first = await _busy(c.prefills)
    decode = await c.decode.next_call()
    await decode.reserve()
    await first.next_call()
    await first.die()
    prefill = await c.other(first).next_call()
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


async def test_without_another_prefill_worker_the_decode_worker_computes(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await prefill.fail(FingerprintMismatch("float32 here, bfloat16 there"))  # even before the reservation is known
    await decode.reserve()
    retarget = await c.decode.next_retarget()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish(prompt_tokens_computed=5)
    finish = await asking.finish()
    assert retarget.to == decode_pb2.RETARGET_TO_LOCAL
    assert asking.text == "ab"
    assert finish.prompt_tokens_computed_on_decode == 5
    assert not finish.HasField("prefill_worker")


async def test_a_pair_that_cannot_speak_is_not_made_again(cluster: Clusters) -> None:
    c = await cluster()
    for _ in range(2):
        asking = c.router.ask()
        decode = await c.decode.next_call()
        if not decode.request.local:
            await (await c.prefill.next_call()).fail(SlowTransport("3 MB/s, under the floor of 100 MB/s"))
        await decode.reserve()
        await decode.tokens(0, ids_of("a"))
        await decode.finish()
        await asking.finish()
    assert decode.request.local and c.prefill.idle


async def test_the_prefill_workers_reply_may_come_after_the_end(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg, "_REPLY_S", 10.0)
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.tokens(0, ids_of("a"))
    await decode.finish()
    await asking.piece()
    await prefill.reply(ids_of("a"))
    finish = await asking.finish()
    assert (asking.text, finish.prefill_worker.worker_id) == ("a", "p0")
    assert finish.transfer.parts_before_last_chunk == 1
    assert not prefill.cancelled.is_set()


@pytest.mark.parametrize("retargeted", [False, True])
async def test_a_prefill_worker_that_has_not_replied_by_the_end_is_named_still(
    cluster: Clusters, retargeted: bool
) -> None:
    c = await cluster(prefill=2)
    asking = c.router.ask()
    first = await _busy(c.prefills)
    await first.next_call()
    decode, last = await c.decode.next_call(), first
    await decode.reserve()
    if retargeted:
        await decode.retargeted(2)
        last = c.other(first)
        await last.next_call()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    assert (await asking.finish()).prefill_worker.worker_id == last.key.worker_id


async def test_where_local_prefill_is_never_a_failed_prefill_fails_the_request(cluster: Clusters) -> None:
    c = await cluster(local_prefill="never")
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(TransferFailed("the write broke"))
    assert isinstance(await asking.error(), TransferFailed)
    await decode.seen_cancelled()


async def test_a_prefill_worker_may_fail_after_everything_landed(cluster: Clusters) -> None:
    c = await cluster()
    c.decode.on_retarget = _answer(decode_pb2.RetargetResponse(already_landed=True))
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(WorkerLost("gone"))
    await c.decode.next_retarget()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    finish = await asking.finish()
    assert (asking.text, finish.prefill_worker.worker_id) == ("ab", "p0")


async def test_a_second_failed_attempt_is_computed_by_the_decode_worker(cluster: Clusters) -> None:
    c = await cluster(prefill=2)
    answers = [decode_pb2.RetargetResponse(attempt=2), decode_pb2.RetargetResponse(local=True)]

    async def retarget(request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        return answers[request.attempt - 1]

    c.decode.on_retarget = retarget
    asking = c.router.ask()
    first = await _busy(c.prefills)
    decode = await c.decode.next_call()
    await decode.reserve()
    await (await first.next_call()).fail(TransferFailed("the write broke"))
    assert (await c.decode.next_retarget()).to == decode_pb2.RETARGET_TO_REMOTE
    await (await c.other(first).next_call()).fail(TransferFailed("the write broke"))
    assert (await c.decode.next_retarget()).to == decode_pb2.RETARGET_TO_LOCAL
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    await asking.finish()


async def test_a_decode_worker_may_retarget_by_itself(cluster: Clusters) -> None:
    c = await cluster(prefill=2)
    asking = c.router.ask()
    first = await _busy(c.prefills)
    prefill, decode = await first.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.retargeted(2)
    await prefill.seen_cancelled()
    prefill = await c.other(first).next_call()
    assert prefill.request.attempt == 2
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    finish = await asking.finish()
    assert finish.attempts == 2
    assert c.decode.retargets.empty()


async def test_where_local_prefill_is_never_a_lone_prefill_worker_gets_the_next_attempt_again(
    cluster: Clusters,
) -> None:
    c = await cluster(local_prefill="never")
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.retargeted(2)
    await prefill.seen_cancelled()
    prefill = await c.prefill.next_call()
    assert prefill.request.attempt == 2
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


@pytest.mark.parametrize("attempt", [2, None])
async def test_a_prefill_worker_that_the_decode_worker_finds_silent_gets_nothing_until_it_beats(
    cluster: Clusters, attempt: int | None
) -> None:
    c = await cluster()
    for silent in (True, False):
        asking = c.router.ask()
        decode = await c.decode.next_call()
        assert decode.request.local is not silent
        await decode.reserve()
        if silent:
            prefill = await c.prefill.next_call()
            await decode.retargeted(attempt)
            await prefill.seen_cancelled()
        await decode.tokens(0, ids_of("ab"))
        await decode.finish()
        await asking.finish()
    await c.router.heartbeat(c.prefill)
    asking = c.router.ask()
    await (await c.prefill.next_call()).reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


async def test_a_decode_worker_may_take_the_prompt_over_by_itself(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.retargeted(None)
    await prefill.seen_cancelled()
    await decode.tokens(0, ids_of("ab"))
    await decode.finish(prompt_tokens_computed=5)
    finish = await asking.finish()
    assert not finish.HasField("prefill_worker")
    assert c.decode.retargets.empty()


async def test_when_both_retarget_the_decode_workers_word_counts(cluster: Clusters) -> None:
    c = await cluster(prefill=2)

    async def too_late(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        raise WrongAttempt("2 is current")

    c.decode.on_retarget = too_late
    asking = c.router.ask()
    first = await _busy(c.prefills)
    prefill, decode = await first.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.fail(RequestCancelled("aborted by the decode worker"))
    await decode.retargeted(2)
    prefill = await c.other(first).next_call()
    assert prefill.request.attempt == 2
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await asking.finish()


# ---- a decode worker dies --------------------------------------------------------------------------------------------


async def test_a_decode_worker_that_dies_before_the_first_token_is_replaced(cluster: Clusters) -> None:
    c = await cluster(decode=2)
    asking = c.router.ask()
    prefill = await c.prefill.next_call()
    first = await _busy(c.decodes)
    await (await first.next_call()).reserve()
    await first.die()
    await prefill.seen_cancelled()
    second = next(decode for decode in c.decodes if decode is not first)
    decode, prefill = await second.next_call(), await c.prefill.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("ab"))
    await decode.finish()
    finish = await asking.finish()
    assert (asking.text, finish.decode_worker.worker_id) == ("ab", second.key.worker_id)


async def test_a_decode_worker_that_dies_after_the_first_token_ends_the_answer(cluster: Clusters) -> None:
    c = await cluster(decode=2)
    asking = c.router.ask()
    prefill = await c.prefill.next_call()
    first = await _busy(c.decodes)
    await (await first.next_call()).reserve()
    await prefill.reply(ids_of("a"))
    await asking.piece()
    await first.die()
    error = await asking.error()
    assert isinstance(error, WorkerLost) and first.key.worker_id in error.message
    assert all(worker.idle for worker in c.decodes)


async def test_a_stream_that_ends_without_a_finish_is_a_lost_worker(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await decode.tokens(0, ids_of("a"))
    await asking.piece()
    await decode.end()
    assert isinstance(await asking.error(), WorkerLost)
    await prefill.seen_cancelled()


async def test_a_newer_epoch_ends_the_requests_of_the_older_one(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await asking.piece()
    async with scripted_decode("d0", epoch=2) as restarted:
        await c.router.register(restarted)
        assert isinstance(await asking.error(), WorkerLost)
        await decode.seen_cancelled()


async def test_a_lease_that_ends_gets_nothing_new_and_its_streams_go_on(cluster: Clusters) -> None:
    c = await cluster(lease_s=0.3, heartbeat_s=0.1, queue_timeout_s=0.2)
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await c.router.until(workers=0)
    assert isinstance(await c.router.ask().error(), NoWorker)
    await prefill.reply(ids_of("a"))
    assert (await asking.piece()).text == "a"
    await c.router.register(c.decode)
    await decode.tokens(0, ids_of("ab"))
    await c.router.until(workers=0)
    await decode.tokens(2, ids_of("c"))
    await decode.finish()
    await asking.finish()
    assert asking.text == "abc"
    assert not c.router.server.fleet._clients


async def test_a_life_whose_lease_has_ended_loses_its_requests_to_a_newer_one(cluster: Clusters) -> None:
    c = await cluster(lease_s=0.3, heartbeat_s=0.1)
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await asking.piece()
    await c.router.until(workers=0)
    async with scripted_decode("d0", epoch=2) as restarted:
        await c.router.register(restarted)
        assert isinstance(await asking.error(), WorkerLost)


async def test_a_worker_with_a_hung_engine_gets_no_request(cluster: Clusters) -> None:
    c = await cluster(prefill=2)
    hung, well = c.prefills
    await c.router.heartbeat(hung, load=msgspec.structs.replace(hung.load, tick_age_ms=6_000.0))
    for _ in range(3):
        asking = c.router.ask()
        await (await well.next_call()).reply(ids_of("a"), finish=FinishReason.STOP)
        await asking.finish()
    assert hung.idle


# ---- the client leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["called", "reserved", "first token", "streaming"])
async def test_a_client_that_cancels_stops_both_workers(cluster: Clusters, state: str) -> None:
    c = await cluster()
    asking = c.router.ask()
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    if state != "called":
        await decode.reserve()
    if state in ("first token", "streaming"):
        await prefill.reply(ids_of("a"))
        await asking.piece()
    if state == "streaming":
        await decode.tokens(0, ids_of("abc"))
        await asking.piece()
    asking.cancel()
    await decode.seen_cancelled()
    if state in ("called", "reserved"):
        await prefill.seen_cancelled()


async def test_a_client_that_cancels_in_the_queue_leaves_it(cluster: Clusters) -> None:
    c = await cluster(prefill=0, decode=0)
    asking = c.router.ask()
    await c.router.until(queued=1)
    asking.cancel()
    await c.router.until(queued=0, active=0)


async def test_an_abort_by_id_stops_both_workers(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask(request_id="mine")
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    again = c.router.ask(request_id="mine")
    assert "in use" in (await again.error()).message
    assert await c.router.abort("mine")
    assert isinstance(await asking.error(), RequestCancelled)
    await prefill.seen_cancelled()
    await decode.seen_cancelled()
    await c.router.until(active=0)
    assert not await c.router.abort("mine")


async def test_a_request_that_runs_out_of_time_stops_both_workers(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask(timeout_s=0.3)
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    assert isinstance(await asking.error(), DeadlineExceeded)
    await prefill.seen_cancelled()
    await decode.seen_cancelled()


async def test_a_stop_string_across_tokens_ends_the_answer_and_aborts_the_decode_worker(cluster: Clusters) -> None:
    c = await cluster()
    asking = c.router.ask(max_tokens=64, stop=["END"])
    prefill, decode = await c.prefill.next_call(), await c.decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("abE"))
    await decode.tokens(3, ids_of("N"))
    await decode.tokens(4, ids_of("Dcde"))
    finish = await asking.finish()
    assert (asking.text, asking.token_ids) == ("ab", ids_of("abEND"))
    assert finish.reason == common_pb2.FINISH_REASON_STOP
    assert (finish.stop_text, finish.usage.completion_tokens) == ("END", 5)
    await decode.seen_cancelled()
    async with asyncio.timeout(5):
        assert await c.decode.aborted.get() == decode.request.reservation_id


# ---- the queue -------------------------------------------------------------------------------------------------------


async def test_a_request_that_runs_out_of_time_in_the_queue_says_so(cluster: Clusters) -> None:
    c = await cluster(decode=0)
    assert isinstance(await c.router.ask(timeout_s=0.2).error(), DeadlineExceeded)


async def test_the_queues_own_patience_tells_no_worker_from_full_ones(cluster: Clusters) -> None:
    c = await cluster(decode=0, queue_timeout_s=0.2)
    assert isinstance(await c.router.ask().error(), NoWorker)
    async with scripted_decode("d0") as decode:
        decode.load = WorkerLoad(total_blocks=128, committed_blocks=128)
        await c.router.register(decode)
        error = await c.router.ask().error()
        assert isinstance(error, Overloaded) and error.retry_after_s > 0


async def test_a_full_queue_refuses_and_says_when_to_come_back(cluster: Clusters) -> None:
    c = await cluster(decode=0, queue_size=2)
    waiting = [c.router.ask(), c.router.ask()]
    await c.router.until(queued=2)
    error = await c.router.ask().error()
    assert isinstance(error, Overloaded) and error.retry_after_s > 0
    for asking in waiting:
        asking.cancel()


async def test_a_queued_request_starts_when_a_worker_registers(cluster: Clusters) -> None:
    c = await cluster(decode=0)
    asking = c.router.ask()
    await c.router.until(queued=1)
    async with scripted_decode("d0") as decode:
        await c.router.register(decode)
        prefill = await c.prefill.next_call()
        await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
        await asking.finish()


async def test_a_prefill_worker_holds_no_more_requests_than_it_has_slots(cluster: Clusters) -> None:
    c = await cluster(prefill_slots=1)
    first, second = c.router.ask(), c.router.ask()
    await c.router.until(queued=1)
    prefill = await c.prefill.next_call()
    assert c.prefill.idle
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    prefill = await c.prefill.next_call()
    await prefill.reply(ids_of("a"), finish=FinishReason.STOP)
    await first.finish()
    await second.finish()


async def test_a_short_prompt_stays_on_the_decode_worker(cluster: Clusters) -> None:
    c = await cluster(local_prefill_below=6)
    asking = c.router.ask("hello")
    decode = await c.decode.next_call()
    assert decode.request.local and c.prefill.idle
    await decode.reserve()
    await decode.tokens(0, ids_of("a"))
    await decode.finish(prompt_tokens_computed=5)
    assert (await asking.finish()).prompt_tokens_computed_on_decode == 5


async def test_a_prompt_that_fits_no_decode_worker_is_refused_at_once(cluster: Clusters) -> None:
    c = await cluster()
    error = await c.router.ask([5] * 2_000, max_tokens=100).error()
    assert isinstance(error, PromptTooLong)
    async with scripted_decode("small", pool_blocks=4) as small, router_bench() as router:
        await router.register(small)
        assert "the pool has 4" in (await router.ask([5] * 100).error()).message


async def test_a_prompt_goes_to_the_decode_worker_that_it_fits_where_another_is_too_small(cluster: Clusters) -> None:
    c = await cluster()
    async with scripted_decode("small", pool_blocks=4) as small:
        await c.router.register(small)
        for _ in range(3):
            asking = c.router.ask([5] * 100)
            await (await c.prefill.next_call()).reply(ids_of("a"), finish=FinishReason.STOP)
            await asking.finish()
        assert small.idle


async def test_a_request_that_only_a_worker_held_which_is_gone_is_not_called_the_clients_fault(
    cluster: Clusters,
) -> None:
    c = await cluster(prefill=0, lease_s=0.5, heartbeat_s=0.1)
    async with scripted_decode("small", pool_blocks=4) as small:
        await c.router.register(small)
        asking = c.router.ask([5] * 100)
        await (await c.decode.next_call()).fail(WorkerLost("d0 died"))
        async with asyncio.timeout(10):
            while c.router.server.fleet.registry.get(c.decode.key) is not None:
                await c.router.heartbeat(small)
                await asyncio.sleep(0.05)
        error = await asking.error()
        assert isinstance(error, NoWorker) and "that could hold the request are gone" in error.message
        assert small.idle


async def test_the_limits_are_those_of_the_worker_that_takes_the_longest_request(cluster: Clusters) -> None:
    c = await cluster(prefill=0, decode=0)
    fleet, own = c.router.server.fleet, Limits(vocab_size=512, context_tokens=8_192, pool_blocks=2**32 - 1)
    async with scripted_decode("long", pool_blocks=4) as long, scripted_decode("roomy", pool_blocks=50) as roomy:
        roomy.context_tokens = 1_024
        await c.router.register(long, roomy)
        assert (fleet.limits(own).context_tokens, fleet.limits(own).pool_blocks) == (1_024, 50)
        asking = c.router.ask([5] * 100)
        call = await roomy.next_call()
        await call.reserve()
        await call.tokens(0, ids_of("a"))
        await call.finish()
        await asking.finish()


async def test_a_client_that_reads_too_slowly_is_cut_off(cluster: Clusters) -> None:
    c = await cluster(prefill=0, max_unacked_tokens=20_000)
    async with c.router.narrow_client() as client:
        asking = client.ask()
        decode = await c.decode.next_call()
        await decode.reserve()
        # Nothing is read, so that the window fills and a write blocks; then tokens pile up.
        for index in range(0, 1_000_000, 1_000):
            await decode.tokens(index, [300] * 1_000)
        await decode.seen_cancelled()
        await c.router.until(active=0)
        error = await asking.error()
        assert isinstance(error, Overloaded) and "reads too slowly" in error.message
        assert len(asking.token_ids) < 1_000_000


async def _busy(workers: list[W]) -> W:
    """The worker that has a call."""
    async with asyncio.timeout(10):
        while True:
            for worker in workers:
                if not worker.idle:
                    return worker
            await asyncio.sleep(0.005)


def _answer(response: decode_pb2.RetargetResponse) -> OnRetarget:
    async def answer(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
        return response

    return answer
