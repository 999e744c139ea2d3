"""A decode front over real gRPC, whose engine is the test: calls, the token stream that they name, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import msgspec
import pytest

from paceline import wire
from paceline.errors import Draining, EngineLost, InvalidRequest, NumericalError, StaleEpoch
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc
from paceline.services.decode import front as front_module
from paceline.services.decode.front import DecodeFront
from paceline.services.decode.messages import (
    ClaimWrite,
    DecodeEvent,
    DecodeReport,
    EndRequest,
    NewTokens,
    Over,
    Reserve,
    Reserved,
    WriterDead,
)
from paceline.services.worker.convert import fingerprint_to_proto
from paceline.services.worker.messages import Failure
from paceline.services.worker.registration import PeerInfo
from paceline.testing.decode_front import decode_front
from paceline.testing.scripted_workers import PATIENCE_S
from paceline.types import FinishReason, ReservationId, WorkerKey, WorkerLoad

NAME = "the router's"


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.commands: list[msgspec.Struct] = []
        self.load = WorkerLoad()

    def send(self, command: msgspec.Struct) -> None:
        self.commands.append(command)


class Bench:
    """A front that serves, and a caller of it."""

    def __init__(self, front: DecodeFront, engine: Engine, stub: Any) -> None:
        self.front = front
        self.engine = engine
        self.stub = stub

    def generate(self, reservation: str, *, token_stream: str = NAME) -> Any:
        request = decode_pb2.DecodeGenerateRequest(
            epoch=1,
            reservation_id=reservation,
            prompt=[5, 6],
            sampling=common_pb2.SamplingParams(max_tokens=8),
            token_stream=token_stream,
            local=True,
        )
        return self.stub.Generate(request, timeout=PATIENCE_S)

    async def open(self, name: str = NAME) -> Any:
        """A token stream that the front knows."""
        known = set(self.front._token_streams.values())
        call = self.stub.StreamTokens(decode_pb2.StreamTokensRequest(token_stream=name, epoch=1), timeout=PATIENCE_S)
        await until(lambda: bool(set(self.front._token_streams.values()) - known))
        return call

    async def told(self, kind: type[msgspec.Struct], number: int = 1) -> None:
        """Returns once the engine was told so many commands of a kind."""
        await until(lambda: sum(isinstance(each, kind) for each in self.engine.commands) >= number)

    def report(self, *events: DecodeEvent) -> None:
        self.front.reported(DecodeReport(load=WorkerLoad(), events=events))

    def aborts(self) -> float:
        return sum(sample.value for metric in self.front.metrics.aborts.collect() for sample in metric.samples[::2])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    engine = Engine()
    async with (
        decode_front(engine) as (front, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS) as channel,
    ):
        yield Bench(front, engine, decode_pb2_grpc.DecodeStub(channel))


def reserved(of: str) -> Reserved:
    return Reserved(reservation_id=ReservationId(of))


def tokens(of: str, index: int, *ids: int) -> NewTokens:
    return NewTokens(reservation_id=ReservationId(of), ids=list(ids), index=index)


def over(of: str, failure: Failure | None = None) -> Over:
    return Over(reservation_id=ReservationId(of), finish=FinishReason.LENGTH, completion_tokens=2, failure=failure)


def ids(answers: Sequence[decode_pb2.DecodeGenerateResponse]) -> list[list[int]]:
    return [list(each.tokens.ids) for each in answers if each.HasField("tokens")]


async def rest(call: Any) -> list[Any]:
    """What a call says, to its end."""
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    return answers


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def test_a_step_of_all_requests_leaves_in_one_message(bench: Bench) -> None:
    stream = await bench.open()
    calls = [bench.generate("a"), bench.generate("b")]
    await bench.told(Reserve, 2)
    bench.report(reserved("a"), reserved("b"))
    assert len((await stream.read()).answers) == 2
    bench.report(tokens("a", 0, 5), tokens("b", 0, 7))
    step = (await stream.read()).answers
    assert [(each.reservation_id, list(each.answer.tokens.ids)) for each in step] == [("a", [5]), ("b", [7])]
    for call in calls:
        call.cancel()
    await bench.told(EndRequest, 2)


async def test_a_call_that_is_cancelled_after_its_last_word_aborts_nothing(bench: Bench) -> None:
    stream = await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"), tokens("a", 0, 5, 6), over("a"))
    [*_, last] = (await stream.read()).answers
    assert last.answer.finish.completion_tokens == 2
    call.cancel()
    await until(lambda: not bench.front.calls_in_hand)
    assert not any(isinstance(each, EndRequest) for each in bench.engine.commands)
    assert bench.aborts() == 0


async def test_a_call_whose_token_stream_breaks_tells_everything_and_goes_on(bench: Bench) -> None:
    stream = await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"), tokens("a", 0, 5))
    await stream.read()
    bench.report(tokens("a", 1, 6))
    stream.cancel()
    assert (await call.read()).HasField("reserved")
    assert list((await call.read()).tokens.ids) == [5, 6]
    bench.report(tokens("a", 2, 7), over("a"))
    answers = await rest(call)
    assert ids(answers) == [[7]]
    assert answers[-1].HasField("finish")


async def test_what_was_over_when_the_token_stream_broke_is_told_again(bench: Bench) -> None:
    """The caller may have lost its end, and has not ended its call."""
    stream = await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"), tokens("a", 0, 5, 6), over("a"))
    stream.cancel()
    answers = await rest(call)
    assert ids(answers) == [[5, 6]]
    assert answers[-1].HasField("finish")


async def test_a_second_token_stream_of_a_name_ends_the_first(bench: Bench) -> None:
    first = await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"))
    second = await bench.open()
    assert (await call.read()).HasField("reserved")
    [message] = await rest(first)
    assert message.answers[0].answer.HasField("reserved")
    later = bench.generate("b")
    await bench.told(Reserve, 2)
    bench.report(tokens("a", 0, 5), tokens("b", 0, 7))
    assert list((await call.read()).tokens.ids) == [5]
    assert [each.reservation_id for each in (await second.read()).answers] == ["b"]
    for each in (call, later):
        each.cancel()


@pytest.mark.parametrize("name", ["", "nobody's"])
async def test_a_call_that_names_no_open_token_stream_is_told_itself(bench: Bench, name: str) -> None:
    await bench.open()
    call = bench.generate("a", token_stream=name)
    await bench.told(Reserve)
    bench.report(reserved("a"), tokens("a", 0, 5, 6), over("a"))
    answers = await rest(call)
    assert ids(answers) == [[5, 6]]
    assert answers[-1].HasField("finish")


async def test_a_failure_ends_the_call_behind_what_was_said(bench: Bench) -> None:
    await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"), tokens("a", 0, 5))
    bench.report(over("a", Failure.of(NumericalError("NaN in row 3"))))
    assert (await call.read()).HasField("reserved")
    assert list((await call.read()).tokens.ids) == [5]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(wire.error_from_rpc(caught.value), NumericalError)


async def test_token_streams_end_with_the_worker_behind_its_requests(bench: Bench) -> None:
    stream = await bench.open()
    call = bench.generate("a")
    await bench.told(Reserve)
    bench.report(reserved("a"))
    await stream.read()
    bench.front.fail_all(Draining("d0@1 stops"))
    assert await rest(stream) == []
    assert (await call.read()).HasField("reserved")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(wire.error_from_rpc(caught.value), Draining)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (decode_pb2.StreamTokensRequest(token_stream=NAME, epoch=2), StaleEpoch),
        (decode_pb2.StreamTokensRequest(epoch=1), InvalidRequest),
    ],
)
async def test_a_token_stream_of_another_life_or_without_a_name_is_refused(
    bench: Bench, request_: decode_pb2.StreamTokensRequest, error: type[Exception]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.StreamTokens(request_, timeout=PATIENCE_S).read()
    assert isinstance(wire.error_from_rpc(caught.value), error)


class Known:
    """Stands for the registration: every prefill worker is known, with the token "t"."""

    async def resolve(self, key: WorkerKey) -> PeerInfo:
        return PeerInfo(key=key, address="127.0.0.1:1", lock_id="lock", claim_token=b"t")


def claim(bench: Bench, reservation: str) -> Any:
    request = decode_pb2.ClaimWriteRequest(
        reservation_id=reservation,
        attempt=1,
        decode_epoch=1,
        writer=wire.key_to_proto(WorkerKey("p0", 1)),
        claim_token=b"t",
        fingerprint=fingerprint_to_proto(bench.front.ready.fingerprint),
    )
    return bench.stub.ClaimWrite(request, timeout=PATIENCE_S)


async def test_a_claim_that_comes_before_its_reservation_reaches_the_engine_behind_it(bench: Bench) -> None:
    bench.front.registration = Known()  # type: ignore[assignment]
    early = claim(bench, "r")
    await until(lambda: len(bench.front._arrivals) == 1)
    assert bench.engine.commands == []
    call = bench.generate("r")
    await bench.told(ClaimWrite)
    assert [type(command) for command in bench.engine.commands] == [Reserve, ClaimWrite]
    assert len(bench.front._arrivals) == 0
    for waiting in (early, call):
        waiting.cancel()


async def test_a_claim_whose_reservation_never_comes_is_the_engines_to_refuse(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.front.registration = Known()  # type: ignore[assignment]
    monkeypatch.setattr(front_module, "EARLY_CLAIM_S", 0.05)
    early = claim(bench, "never")
    await bench.told(ClaimWrite)
    early.cancel()
    given_up = claim(bench, "given up")
    await until(lambda: len(bench.front._arrivals) == 1)
    given_up.cancel()
    await until(lambda: len(bench.front._arrivals) == 0)


async def test_a_writer_whose_next_life_registers_while_its_claim_waits_is_dead_to_the_engine(bench: Bench) -> None:
    bench.front.registration = Known()  # type: ignore[assignment]
    early = claim(bench, "r")
    await until(lambda: len(bench.front._arrivals) == 1)
    bench.front.peer_found(PeerInfo(WorkerKey("p0", 2), "127.0.0.1:1", "lock", b"t"))
    call = bench.generate("r")
    await bench.told(ClaimWrite)
    assert [type(command) for command in bench.engine.commands] == [WriterDead, Reserve, ClaimWrite]
    for waiting in (early, call):
        waiting.cancel()


async def test_claims_hear_of_the_engines_end_those_that_wait_for_a_reservation_and_those_that_come_later(
    bench: Bench,
) -> None:
    bench.front.registration = Known()  # type: ignore[assignment]
    early, call = claim(bench, "never"), bench.generate("r")
    await until(lambda: len(bench.front._arrivals) == 1)
    await bench.told(Reserve)
    bench.front.fail_all(EngineLost("the engine of d0@1 has ended"))
    for late in (early, claim(bench, "r"), call.read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        assert isinstance(wire.error_from_rpc(caught.value), EngineLost)
    assert len(bench.front._arrivals) == 0
