"""What a decode worker says of all requests over one call: merged with what it says over each request's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from paceline.errors import EngineError, NumericalError, Overloaded, WorkerLost
from paceline.protos import common_pb2, decode_pb2
from paceline.services.router import token_stream
from paceline.services.router.calls import WorkerClient
from paceline.services.router.registry import WorkerInfo
from paceline.testing.router_bench import RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import PATIENCE_S, Context, DecodeCall, ScriptedDecode
from paceline.types import Limits, Role, WorkerKey

Answer = decode_pb2.DecodeGenerateResponse


class SharedCall:
    """One StreamTokens call."""

    def __init__(self, request: decode_pb2.StreamTokensRequest) -> None:
        self.name = request.token_stream
        self._acts: asyncio.Queue[Message | None] = asyncio.Queue()

    def say(self, *answers: tuple[DecodeCall | None, Answer]) -> None:
        """Sends answers of several requests in one message; of None, of one that nobody knows."""
        said = [
            decode_pb2.RequestAnswer(reservation_id=call.request.reservation_id if call else "unknown", answer=answer)
            for call, answer in answers
        ]
        self._acts.put_nowait(decode_pb2.StreamTokensResponse(answers=said))

    def break_off(self) -> None:
        """Ends the call."""
        self._acts.put_nowait(None)

    async def run(self, context: Context) -> None:
        while (act := await self._acts.get()) is not None:
            await context.write(act)


class StreamingDecode(ScriptedDecode):
    """A decode worker that knows token streams."""

    def __init__(self) -> None:
        super().__init__("d0", epoch=1, pool_blocks=128, model="dummy:tiny", dtype="float32")
        self.shared: asyncio.Queue[SharedCall] = asyncio.Queue()

    async def next_shared(self) -> SharedCall:
        """The next StreamTokens call to arrive."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.shared.get()

    async def StreamTokens(self, request: decode_pb2.StreamTokensRequest, context: Context) -> None:
        """Hands the call to the test."""
        call = SharedCall(request)
        self.shared.put_nowait(call)
        await call.run(context)


class Bench:
    """A router and one decode worker, which computes all prompts."""

    def __init__(self, router: RouterBench, decode: StreamingDecode) -> None:
        self.router = router
        self.decode = decode


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Bench:
            decode = StreamingDecode()
            await decode.start()
            stack.push_async_callback(decode.die)
            router = await stack.enter_async_context(router_bench(**settings))
            await router.register(decode)
            return Bench(router, decode)

        yield start


def reserved() -> Answer:
    return Answer(reserved=decode_pb2.Reserved(attempt=1))


def tokens(index: int, text: str, choice: int = 0) -> Answer:
    return Answer(tokens=decode_pb2.Tokens(ids=ids_of(text), index=index, choice=choice))


def finish(completion_tokens: int) -> Answer:
    reason = common_pb2.FINISH_REASON_LENGTH
    return Answer(finish=decode_pb2.DecodeFinish(reason=reason, completion_tokens=completion_tokens, attempts=1))


def choice_finish(choice: int, completion_tokens: int) -> Answer:
    reason = common_pb2.FINISH_REASON_LENGTH
    ended = decode_pb2.ChoiceFinish(choice=choice, reason=reason, completion_tokens=completion_tokens)
    return Answer(choice_finish=ended)


async def test_requests_name_the_routers_stream_and_are_served_over_it(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = [b.router.ask("first"), b.router.ask("second")]
    calls = [await b.decode.next_call(), await b.decode.next_call()]
    assert {call.request.token_stream for call in calls} == {shared.name}
    one, two = calls
    shared.say((one, reserved()), (two, reserved()))
    shared.say((one, tokens(0, "a")), (None, tokens(0, "z")), (two, tokens(0, "x")))
    shared.say((one, tokens(1, "b")), (two, tokens(1, "y")), (two, finish(2)))
    shared.say((one, finish(2)))
    for each in asking:
        assert (await each.finish()).usage.completion_tokens == 2
    assert {each.text for each in asking} == {"ab", "xy"}
    for call in calls:
        await call.seen_cancelled()  # how the worker knows that all has arrived


async def test_a_request_goes_on_over_its_own_call_where_the_stream_breaks(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = b.router.ask()
    call = await b.decode.next_call()
    shared.say((call, reserved()), (call, tokens(0, "ab")))
    assert (await asking.piece()).text == "ab"
    shared.break_off()
    await call.reserve()
    await call.tokens(0, ids_of("abc"))
    await call.tokens(3, ids_of("d"))
    await call.finish()
    assert (await asking.finish()).usage.completion_tokens == 4
    assert (asking.text, asking.token_ids) == ("abcd", ids_of("abcd"))


async def test_ends_of_choices_that_are_told_again_end_nothing_twice(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = b.router.ask(n=2)
    call = await b.decode.next_call()
    shared.say((call, reserved()), (call, tokens(0, "a")), (call, tokens(0, "x", 1)), (call, choice_finish(1, 1)))
    shared.break_off()
    await call.reserve()
    await call.tokens(0, ids_of("ab"))
    await call.tokens(0, ids_of("x"), choice=1)
    await call.finish_choice(1)
    await call.finish_choice(0)
    await call.finish()
    await asking.finish()
    finish = await asking.finish()
    assert finish.usage.completion_tokens == 3
    for choice, text in enumerate(("ab", "x")):
        assert "".join(piece.text for piece in asking.pieces if piece.choice == choice) == text


async def test_a_stream_that_breaks_is_opened_again_under_its_name(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "_REOPEN_S", (0.0, 0.01))
    b = await start()
    first = await b.decode.next_shared()
    first.break_off()
    second = await b.decode.next_shared()
    assert second.name == first.name
    asking = b.router.ask()
    call = await b.decode.next_call()
    second.say((call, reserved()), (call, tokens(0, "ab")), (call, finish(2)))
    await asking.finish()
    assert asking.text == "ab"


async def test_a_stream_that_is_not_understood_is_opened_again_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "_REOPEN_S", (0.01,))
    opened: asyncio.Queue[None] = asyncio.Queue()

    async def garbled(_request: bytes, context: Any) -> None:
        opened.put_nowait(None)
        await context.write(b"\xff")

    handlers = {"StreamTokens": grpc.unary_stream_rpc_method_handler(garbled)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("paceline.v1.Decode", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    limits = Limits(vocab_size=512, context_tokens=2_048, pool_blocks=64)
    info = WorkerInfo(
        key=WorkerKey("d0", 1), role=Role.DECODE, address=address, model="none", limits=limits, fingerprint=b""
    )
    client = WorkerClient(info)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                await opened.get()
    finally:
        await client.close()
        await server.stop(None)


async def test_an_error_of_the_call_ends_a_request_that_is_said_over_the_stream(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = b.router.ask()
    call = await b.decode.next_call()
    shared.say((call, reserved()), (call, tokens(0, "a")))
    await asking.piece()
    await call.fail(NumericalError("NaN in row 3"))
    assert isinstance(await asking.error(), NumericalError)


async def test_a_finish_without_all_its_tokens_is_an_error(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = b.router.ask()
    call = await b.decode.next_call()
    shared.say((call, reserved()), (call, tokens(0, "a")), (call, finish(2)))
    assert "token 1 of it never came" in (await asking.error()).message


@pytest.mark.parametrize(
    ("answer", "error"), [(Answer(), EngineError), (tokens(0, "x"), WorkerLost)], ids=["unknown", "contradicting"]
)
async def test_what_breaks_one_request_leaves_the_others_of_the_message_alone(
    start: Callable[..., Any], answer: Answer, error: type[Exception]
) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    asking = [b.router.ask()]
    one = await b.decode.next_call()
    asking.append(b.router.ask())
    two = await b.decode.next_call()
    shared.say((one, reserved()), (two, reserved()), (one, tokens(0, "a")))
    await asking[0].piece()
    shared.say((one, answer), (two, tokens(0, "ab")), (two, finish(2)))
    assert isinstance(await asking[0].error(), error)
    await asking[1].finish()
    assert asking[1].text == "ab"


async def test_a_slow_client_is_found_and_takes_no_other_client_down(start: Callable[..., Any]) -> None:
    b = await start(max_unacked_tokens=4_096)
    shared = await b.decode.next_shared()
    async with b.router.narrow_client() as narrow:
        slow = narrow.ask(max_tokens=1_000)
        call = await b.decode.next_call()
        brisk = b.router.ask(max_tokens=1_000)
        other = await b.decode.next_call()
        shared.say((call, reserved()), (other, reserved()))
        # Nothing is read, so that the window fills and a write blocks; then tokens pile up.
        for index in range(0, 1_000_000, 1_000):
            shared.say((call, tokens(index, "a" * 1_000)))
        await call.seen_cancelled()
        shared.say((other, tokens(0, "ab")), (other, finish(2)))
        await brisk.finish()
        assert brisk.text == "ab"
        assert isinstance(await slow.error(), Overloaded)


async def test_a_client_that_leaves_ends_its_request_alone(start: Callable[..., Any]) -> None:
    b = await start()
    shared = await b.decode.next_shared()
    leaving = b.router.ask()
    gone = await b.decode.next_call()
    staying = b.router.ask()
    other = await b.decode.next_call()
    shared.say((gone, reserved()), (other, reserved()), (gone, tokens(0, "a")), (other, tokens(0, "x")))
    await leaving.piece()
    leaving.cancel()
    await gone.seen_cancelled()
    shared.say((gone, tokens(1, "b")), (other, tokens(1, "y")), (other, finish(2)))
    await staying.finish()
    assert staying.text == "xy"
