"""The decode front: `Decode.Generate` and `Decode.StreamTokens` tell what the engine reports; claims and re-targets are
calls beside them.

The front holds no state of a reservation but the stream that waits for it (`streams`): its engine owns the table.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import grpc
import msgspec

from paceline import log, wire
from paceline.config import DecodeConfig
from paceline.errors import AlreadyLanded, DeadlineExceeded, InvalidRequest, PacelineError
from paceline.protos import decode_pb2, decode_pb2_grpc
from paceline.services.decode.arrivals import Arrivals
from paceline.services.decode.engine_calls import EngineCalls
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
)
from paceline.services.decode.replies import StreamEvent, joined, messages, reply
from paceline.services.decode.streams import RequestStream, TokenStream
from paceline.services.decode.writers import Writers
from paceline.services.worker.convert import fingerprint_from_proto, fingerprint_to_proto
from paceline.services.worker.front import WorkerFront
from paceline.services.worker.registration import PeerInfo
from paceline.types import ReservationId, Role, WorkerKey, WorkerLoad, check_prompt

EARLY_CLAIM_S: Final = 1.0
"""How long a claim waits here for its reservation; its writer asks again after that."""

_log = log.get_logger(__name__)


class DecodeFront(WorkerFront[DecodeConfig], decode_pb2_grpc.DecodeServicer):
    """The servicer and what it needs to know of its engine."""

    role = Role.DECODE
    engine_module = "paceline.services.decode.worker"
    report_type = DecodeReport
    service_name = "paceline.v1.Decode"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self._streams: dict[ReservationId, RequestStream] = {}
        self._token_streams: dict[str, TokenStream] = {}  # by their callers' names
        self._arrivals = Arrivals()
        self._calls = EngineCalls()
        self._writers = Writers(self.send, self._resolve, self.background)

    # The worker's life

    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Adds `Decode`."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    @property
    def calls_in_hand(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    def peer_found(self, peer: PeerInfo) -> None:
        """A new life of a prefill worker may prove earlier ones dead."""
        self._writers.found(peer)

    async def drain(self) -> None:
        """Takes nothing new; once nothing is left, token streams end."""
        await super().drain()
        self._end_token_streams()

    def fail_all(self, error: PacelineError) -> None:
        """Ends every stream and call with the error."""
        for stream in self._streams.values():
            stream.fail(error)
        self._end_token_streams()
        self._arrivals.fail_all(error)
        self._calls.fail_all(error)

    async def close(self) -> None:
        """Closes the channels to peers."""
        await self._writers.close()

    def reported(self, report: DecodeReport) -> None:
        """Hands the engine's events to whom they concern."""
        for state, cause, number in report.ended:
            self.metrics.reservations_ended.labels(state, cause).inc(number)
        for event in report.events:
            self._dispatch(event)

    def _dispatch(self, event: DecodeEvent) -> None:
        match event:
            case NewTokens() | Reserved() | ChoiceOver() | Over():
                self._to_stream(event)
            case Redirected():
                self._to_stream(event)
                if event.call_id is not None:
                    self._calls.answer(event.call_id, event)
            case WriteGranted():
                self._calls.answer(event.call_id, event)
            case CallRefused():
                self._calls.refuse(event)
            case StopWriter():
                self._writers.stop(event)
            case QuarantineAlarm():
                _log.error("blocks in quarantine", **msgspec.to_builtins(event))
            case MustRestart():
                self._restart(event)

    def _to_stream(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.reservation_id)
        if stream is not None:
            stream.put(event)

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
            stream = RequestStream(reservation, self._token_streams.get(request.token_stream))
            self._streams[reservation] = stream
            late = DeadlineExceeded(f"request {request.request_id!r} ran out of time")
            timer = None
            if request.HasField("timeout"):
                timer = asyncio.get_running_loop().call_later(wire.seconds(request.timeout), stream.fail, late)
            cause: Literal["stream_lost", "deadline"] = "stream_lost"
            try:
                self.send(command)
                self._arrivals.came(reservation)
                over = False
                while not over:
                    for event in joined(await stream.take()):
                        if isinstance(event, PacelineError):
                            cause = "deadline" if event is late else cause
                            raise event
                        over = isinstance(event, Over)
                        yield reply(event, self._load)
            finally:
                if timer is not None:
                    timer.cancel()
                del self._streams[reservation]
                stream.close()
                if not stream.over:
                    self.metrics.aborts.labels(cause).inc()
                    self.send(EndRequest(reservation_id=reservation, cause=cause))

    async def StreamTokens(
        self, request: decode_pb2.StreamTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """What is said of all requests that name it; see the proto."""
        async with wire.answering_errors(context):
            self.admit(request.epoch)
            name = request.token_stream
            if not name:
                raise InvalidRequest("token_stream", "is empty")
            if (earlier := self._token_streams.get(name)) is not None:
                earlier.end()
            stream = self._token_streams[name] = TokenStream()
            try:
                while not stream.ended:
                    for message in messages(await stream.take(), self._load):
                        await context.write(message)
            finally:
                if self._token_streams.get(name) is stream:
                    del self._token_streams[name]
                stream.end()

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
            # Before anything is waited for: a later life that registers meanwhile proves this one dead.
            self._writers.granting(writer, peer.lock_id)
            reservation = ReservationId(request.reservation_id)
            if reservation not in self._streams:
                # The router calls both tiers at once, and a call with a prompt takes longer to read than this one. Were
                # it refused, the writer would ask again after a pause, and a short prompt would wait for that.
                await self._arrivals.wait(reservation, EARLY_CLAIM_S)
            granted = await self._calls.ask(
                self.send,
                lambda call_id: ClaimWrite(
                    call_id=call_id,
                    reservation_id=reservation,
                    attempt=request.attempt,
                    writer=writer,
                    fingerprint=fingerprint_from_proto(request.fingerprint),
                ),
            )
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
            load = wire.load_to_proto(self.load)
            try:
                redirected = await self._calls.ask(
                    self.send,
                    lambda call_id: GiveUpAttempt(
                        call_id=call_id,
                        reservation_id=ReservationId(request.reservation_id),
                        attempt=request.attempt,
                        local=request.to == decode_pb2.RETARGET_TO_LOCAL,
                    ),
                )
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

    def _load(self) -> WorkerLoad:
        return self.load

    def _end_token_streams(self) -> None:
        for stream in list(self._token_streams.values()):
            stream.end()

    async def _resolve(self, writer: WorkerKey) -> PeerInfo:
        return await self.registration.resolve(writer)


async def serve(config: DecodeConfig) -> int:
    """Runs a decode worker until it is told to stop; returns the exit status."""
    front = DecodeFront(config)
    try:
        return await front.serve()
    finally:
        await front.close()
