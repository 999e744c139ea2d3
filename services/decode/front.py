"""The decode front: `Decode.Generate` streams out what the engine reports; claims and re-targets are calls beside it.

The front holds no state of a reservation but the stream that waits for it. The engine process owns the table; the front
carries its orders to prefill workers (stop writing!) and their answers back, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import grpc
import msgspec

from paceline import log, wire
from paceline.config import DecodeConfig
from paceline.errors import (
    AlreadyLanded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PacelineError,
    WorkerLost,
)
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from paceline.services.decode.messages import (
    CallRefused,
    ChoiceOver,
    ClaimWrite,
    DecodeEvent,
    DecodeReport,
    EndChoice,
    EndRequest,
    GiveUpAttempt,
    MustRestart,
    NewTokens,
    Over,
    QuarantineAlarm,
    Redirected,
    Reserve,
    Reserved,
    StopWriter,
    WriteGranted,
    WriterDead,
    WriterStopped,
)
from paceline.services.worker.convert import fingerprint_from_proto, fingerprint_to_proto
from paceline.services.worker.front import WorkerFront
from paceline.services.worker.mailbox import Mailbox
from paceline.services.worker.peers import PeerChannels
from paceline.services.worker.registration import PeerInfo
from paceline.types import BLOCK_TOKENS, ReservationId, Role, WorkerKey, check_prompt

_log = log.get_logger(__name__)

_TELL_AGAIN_S: Final = 0.2
_STOP_CALL_S: Final = 60.0
"""How long a prefill worker may take to stop. It answers between two steps, and a loaded machine takes its time; a dead
one fails the call at once."""

StreamEvent: TypeAlias = Reserved | NewTokens | ChoiceOver | Redirected | Over
CallAnswer: TypeAlias = WriteGranted | Redirected


class DecodeFront(WorkerFront[DecodeConfig], decode_pb2_grpc.DecodeServicer):
    """The servicer and what it needs to know of its engine."""

    role = Role.DECODE
    engine_module = "paceline.services.decode.worker"
    report_type = DecodeReport
    service_name = "paceline.v1.Decode"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self._streams: dict[ReservationId, Mailbox[StreamEvent | PacelineError]] = {}
        self._calls: dict[int, asyncio.Future[CallAnswer]] = {}
        self._call_ids = itertools.count(1)
        self._writers: dict[WorkerKey, str] = {}  # that were granted blocks, and the start locks that they hold
        self._stopping: set[StopWriter] = set()  # orders whose answers are awaited
        self._channels = PeerChannels()

    # The worker's life

    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Adds `Decode`."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    @property
    def calls_in_hand(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    def peer_found(self, peer: PeerInfo) -> None:
        """A new life of a prefill worker proves those earlier ones dead that held the very lock that it holds."""
        self._channels.replaced(peer.key)
        self._proves(peer.key, peer.lock_id)

    def _proves(self, later: WorkerKey, lock_id: str) -> None:
        """`later` holds `lock_id`: earlier writers that held it cannot write any more. Others, elsewhere, may."""
        for writer, held in list(self._writers.items()):
            if writer.worker_id == later.worker_id and writer.epoch < later.epoch and held == lock_id != "":
                del self._writers[writer]
                self.background(self._tell_dead(writer))

    async def _tell_dead(self, writer: WorkerKey) -> None:
        """Told until the engine takes it: nothing else frees what that writer left in quarantine."""
        while True:
            try:
                self.send(WriterDead(writer=writer))
                return
            except Overloaded:
                await asyncio.sleep(_TELL_AGAIN_S)

    def fail_all(self, error: PacelineError) -> None:
        """Ends every stream and call with the error."""
        for stream in self._streams.values():
            stream.put(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    async def close(self) -> None:
        """Closes the channels to peers."""
        await self._channels.close()

    def reported(self, report: DecodeReport) -> None:
        """Hands the engine's events to whom they concern."""
        for state, cause, number in report.ended:
            self.metrics.reservations_ended.labels(state, cause).inc(number)
        for event in report.events:
            self._dispatch(event)

    def _dispatch(self, event: DecodeEvent) -> None:
        match event:
            case Reserved() | NewTokens() | ChoiceOver() | Over():
                self._to_stream(event)
            case Redirected():
                self._to_stream(event)
                if event.call_id is not None:
                    self._answer(event.call_id, event)
            case WriteGranted():
                self._answer(event.call_id, event)
            case CallRefused():
                call = self._calls.get(event.call_id)
                if call is not None and not call.done():
                    call.set_exception(event.failure.error())
            case StopWriter() if event not in self._stopping:
                self._stopping.add(event)
                self.background(self._stop_writer(event))
            case StopWriter():
                pass  # asked again while the answer is awaited
            case QuarantineAlarm():
                _log.error("blocks in quarantine", **msgspec.to_builtins(event))
            case MustRestart():
                self._restart(event)

    def _to_stream(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.reservation_id)
        if stream is not None:
            stream.put(event)

    def _answer(self, call_id: int, answer: CallAnswer) -> None:
        call = self._calls.get(call_id)
        if call is not None and not call.done():
            call.set_result(answer)

    def _restart(self, event: MustRestart) -> None:
        """Too much of the pool may still be written to by others: only a new pool, under a new epoch, is safe."""
        _log.error("restarting", **msgspec.to_builtins(event))
        self.request_restart()

    # The service

    async def Generate(
        self, request: decode_pb2.DecodeGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        """One request; see the proto."""
        async with wire.answering_errors(context):
            log.bind(request_id=request.request_id, reservation=request.reservation_id)
            command = await self.read(request, len(request.prompt), self._validated)
            reservation = command.reservation_id
            if reservation in self._streams:
                raise InvalidRequest("reservation_id", f"{reservation!r} is in use: each request needs one of its own")
            stream = self._streams[reservation] = Mailbox()
            late = DeadlineExceeded(f"request {request.request_id!r} ran out of time")
            timer = None
            if request.HasField("timeout"):
                timer = asyncio.get_running_loop().call_later(wire.seconds(request.timeout), stream.put, late)
            cause: Literal["stream_lost", "deadline"] | None = "stream_lost"
            try:
                self.send(command)
                while cause is not None:
                    for event in joined(await stream.take()):
                        if isinstance(event, PacelineError):
                            cause = "deadline" if event is late else cause
                            raise event
                        if isinstance(event, Over):
                            cause = None
                        yield self._response(event)
            finally:
                if timer is not None:
                    timer.cancel()
                del self._streams[reservation]
                if cause is not None:
                    self.metrics.aborts.labels(cause).inc()
                    self.send(EndRequest(reservation_id=reservation, cause=cause))

    async def ClaimWrite(
        self, request: decode_pb2.ClaimWriteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ClaimWriteResponse:
        """Makes a prefill worker the one writer; see the proto."""
        async with wire.answering_errors(context):
            log.bind(reservation=request.reservation_id)
            self.check_epoch(request.decode_epoch)
            writer = wire.key_from_proto(request.writer)
            peer = await self.registration.resolve(writer)
            if not hmac.compare_digest(peer.claim_token, request.claim_token):
                raise InvalidRequest("claim_token", f"is not the one that {writer} registered with")
            self._writers[writer] = peer.lock_id
            call_id, answer = self._call()
            self.send(
                ClaimWrite(
                    call_id=call_id,
                    reservation_id=ReservationId(request.reservation_id),
                    attempt=request.attempt,
                    writer=writer,
                    fingerprint=fingerprint_from_proto(request.fingerprint),
                )
            )
            granted = await self._answered(call_id, answer)
            assert isinstance(granted, WriteGranted), "a claim is answered by a grant"
            return decode_pb2.ClaimWriteResponse(
                blocks=granted.blocks,
                held_tokens=granted.held_tokens,
                agent=granted.agent,
                load=wire.load_to_proto(self.load),
                fingerprint=fingerprint_to_proto(self.ready.fingerprint),
            )

    async def Retarget(
        self, request: decode_pb2.RetargetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.RetargetResponse:
        """Gives an attempt up; see the proto."""
        async with wire.answering_errors(context):
            if request.to not in (decode_pb2.RETARGET_TO_REMOTE, decode_pb2.RETARGET_TO_LOCAL):
                raise InvalidRequest("to", f"{request.to} is neither REMOTE nor LOCAL")
            call_id, answer = self._call()
            self.send(
                GiveUpAttempt(
                    call_id=call_id,
                    reservation_id=ReservationId(request.reservation_id),
                    attempt=request.attempt,
                    local=request.to == decode_pb2.RETARGET_TO_LOCAL,
                )
            )
            load = wire.load_to_proto(self.load)
            try:
                redirected = await self._answered(call_id, answer)
            except AlreadyLanded:
                return decode_pb2.RetargetResponse(already_landed=True, load=load)
            assert isinstance(redirected, Redirected), "a re-target is answered by a new target"
            if redirected.attempt is None:
                return decode_pb2.RetargetResponse(local=True, load=load)
            return decode_pb2.RetargetResponse(attempt=redirected.attempt, load=load)

    async def Abort(
        self, request: decode_pb2.DecodeAbortRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeAbortResponse:
        """Ends a request, or one of its choices; the stream of the former ends with CANCELLED."""
        reservation = ReservationId(request.reservation_id)
        found = reservation in self._streams
        if found and request.HasField("choice"):
            self.send(EndChoice(reservation_id=reservation, choice=request.choice))
        elif found:
            self.metrics.aborts.labels("aborted").inc()
            self.send(EndRequest(reservation_id=reservation))
        return decode_pb2.DecodeAbortResponse(found=found, load=wire.load_to_proto(self.load))

    async def GetLoads(
        self, _request: decode_pb2.DecodeGetLoadsRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeGetLoadsResponse:
        """The load now."""
        return decode_pb2.DecodeGetLoadsResponse(load=wire.load_to_proto(self.load))

    async def GetServerInfo(
        self, _request: decode_pb2.DecodeGetServerInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeGetServerInfoResponse:
        """Who this is."""
        return decode_pb2.DecodeGetServerInfoResponse(server=self.server_info())

    async def SubscribeKvEvents(
        self, _request: decode_pb2.DecodeSubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeSubscribeKvEventsResponse]:
        """What the prefix cache holds, and its changes; see the proto."""
        async with wire.answering_errors(context):
            async for event in self.kv_events.subscribe():
                yield decode_pb2.DecodeSubscribeKvEventsResponse(event=event, epoch=self.key.epoch)

    async def Drain(
        self, _request: decode_pb2.DecodeDrainRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.DecodeDrainResponse:
        """Takes nothing new; answers when nothing is left."""
        await self.drain()
        return decode_pb2.DecodeDrainResponse(load=wire.load_to_proto(self.load))

    # The work

    def _validated(self, request: decode_pb2.DecodeGenerateRequest) -> Reserve:
        self.admit(request.epoch)
        limits = self.ready.limits
        sampling = wire.sampling_from_proto(request.sampling, seed=0).validated(vocab_size=limits.vocab_size)
        prompt = request.prompt[:]  # a slice is a list, made at once
        check_prompt(prompt, max_tokens=sampling.max_tokens, limits=limits)
        if not request.reservation_id:
            raise InvalidRequest("reservation_id", "is empty")
        return Reserve(
            reservation_id=ReservationId(request.reservation_id),
            prompt=prompt,
            sampling=sampling,
            local=request.local or self.config.local_prefill == "always",
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def _response(self, event: StreamEvent) -> decode_pb2.DecodeGenerateResponse:
        match event:
            case Reserved():
                reserved = decode_pb2.Reserved(attempt=1, load=wire.load_to_proto(self.load))
                return decode_pb2.DecodeGenerateResponse(reserved=reserved)
            case NewTokens():
                tokens = decode_pb2.Tokens(
                    ids=event.ids,
                    index=event.index,
                    choice=event.choice,
                    logprobs=[wire.logprob_to_proto(each) for each in event.logprobs],
                    prompt_logprobs=[wire.logprob_to_proto(each) for each in event.prompt_logprobs],
                )
                return decode_pb2.DecodeGenerateResponse(tokens=tokens)
            case ChoiceOver():
                ended = decode_pb2.ChoiceFinish(
                    choice=event.choice,
                    reason=wire.finish_to_proto(event.finish),
                    completion_tokens=event.completion_tokens,
                )
                return decode_pb2.DecodeGenerateResponse(choice_finish=ended)
            case Redirected():
                return decode_pb2.DecodeGenerateResponse(retargeted=decode_pb2.Retargeted(attempt=event.attempt))
            case Over():
                if event.failure is not None:
                    raise event.failure.error()
                return decode_pb2.DecodeGenerateResponse(finish=self._finish(event))

    def _finish(self, over: Over) -> decode_pb2.DecodeFinish:
        return decode_pb2.DecodeFinish(
            reason=wire.finish_to_proto(over.finish),
            completion_tokens=over.completion_tokens,
            prompt_tokens_computed=over.prompt_tokens_computed,
            cached_tokens=over.cached_tokens,
            transfer=common_pb2.Transfer(
                blocks=over.blocks_landed,
                bytes=over.bytes_landed,
                parts=over.parts_landed,
                duration=wire.duration(over.landing_seconds),
                held_blocks=over.cached_tokens // BLOCK_TOKENS,
            ),
            load=wire.load_to_proto(self.load),
            attempts=over.attempts,
        )

    def _call(self) -> tuple[int, asyncio.Future[CallAnswer]]:
        call_id = next(self._call_ids)
        answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        return call_id, answer

    async def _answered(self, call_id: int, answer: asyncio.Future[CallAnswer]) -> CallAnswer:
        try:
            return await answer
        finally:
            del self._calls[call_id]

    async def _stop_writer(self, order: StopWriter) -> None:
        """Asks a prefill worker to stop, and tells the engine when nothing of the attempt can be written any more.

        The engine orders it again while it has no answer, so a call that fails is not repeated here.
        """
        try:
            peer = await self.registration.resolve(order.writer)
            stub = prefill_pb2_grpc.PrefillStub(self._channels.to(peer))
            answer = await stub.Abort(
                prefill_pb2.PrefillAbortRequest(
                    reservation_id=order.reservation_id, attempt=order.attempt, epoch=order.writer.epoch
                ),
                timeout=_STOP_CALL_S,
            )
        except (PacelineError, grpc.RpcError) as error:
            translated = error if isinstance(error, PacelineError) else wire.error_from_rpc(error)
            _log.warning(
                "writer not stopped",
                writer=str(order.writer),
                reservation=order.reservation_id,
                reason=translated.reason,
                lost=isinstance(translated, WorkerLost),
            )
            return
        finally:
            self._stopping.discard(order)
        if answer.epoch > order.writer.epoch:
            self._proves(WorkerKey(order.writer.worker_id, answer.epoch), answer.lock_id)
        else:
            self.send(WriterStopped(reservation_id=order.reservation_id, attempt=order.attempt, writer=order.writer))


def joined(events: Sequence[StreamEvent | PacelineError]) -> Iterator[StreamEvent | PacelineError]:
    """The events, with tokens that follow each other in one choice as one: who is behind writes fewer messages."""
    last: NewTokens | None = None
    for event in events:
        if last is not None and isinstance(event, NewTokens) and _continues(event, last):
            last = msgspec.structs.replace(last, ids=last.ids + event.ids, logprobs=last.logprobs + event.logprobs)
            continue
        if last is not None:
            yield last
        last = event if isinstance(event, NewTokens) else None
        if last is None:
            yield event
    if last is not None:
        yield last


def _continues(tokens: NewTokens, last: NewTokens) -> bool:
    return tokens.choice == last.choice and tokens.index == last.index + len(last.ids) and not tokens.prompt_logprobs


async def serve(config: DecodeConfig) -> int:
    """Runs a decode worker until it is told to stop; returns the exit status."""
    front = DecodeFront(config)
    try:
        return await front.serve()
    finally:
        await front.close()
