"""The prefill front: `Prefill.Prefill` in, a claim on the decode worker beside it, the first token out.

A call hands the prompt to the engine at once and claims the destination meanwhile; the engine posts nothing before the
claim is granted. The claim may reach the decode worker before the reservation does, for the router sends both at once:
it waits there for a moment, and is repeated here for another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from paceline import log, wire
from paceline.config import PrefillConfig
from paceline.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    Overloaded,
    PacelineError,
    RequestCancelled,
    StaleEpoch,
    UnknownReservation,
    WorkerLost,
)
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from paceline.services.prefill.messages import (
    AbortAttempt,
    Attempt,
    Measured,
    Prefilled,
    PrefillFailed,
    PrefillReport,
    StartPrefill,
    Stopped,
    WriteTo,
)
from paceline.services.prefill.pair_test import PairTests
from paceline.services.worker.convert import fingerprint_from_proto, fingerprint_to_proto
from paceline.services.worker.front import WorkerFront
from paceline.services.worker.peers import PeerChannels
from paceline.services.worker.registration import PeerInfo
from paceline.types import ReservationId, Role, WorkerKey, check_prompt

_log = log.get_logger(__name__)

_CLAIM_S: Final = 30.0
"""How long a claim may take. The decode worker answers between two steps; its own timer gives an attempt up earlier."""
_EARLY_CLAIM_S: Final = 5.0
"""How long a claim may be ahead of its reservation."""
_TELL_AGAIN_S: Final = 0.2
_CLAIM_PAUSE_S: Final = 0.002
_CLAIM_PAUSE_MOST_S: Final = 0.1


@dataclass(slots=True)
class _Call:
    """A prompt in hand. `answer` is what its caller waits for."""

    peer: PeerInfo
    answer: asyncio.Future[Prefilled] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: PacelineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class PrefillFront(WorkerFront[PrefillConfig], prefill_pb2_grpc.PrefillServicer):
    """The servicer and what it needs to know of its engine."""

    role = Role.PREFILL
    engine_module = "paceline.services.prefill.worker"
    report_type = PrefillReport
    service_name = "paceline.v1.Prefill"

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self._calls: dict[Attempt, _Call] = {}
        self._stops: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = itertools.count(1)
        self._engine_dead = False
        self._channels = PeerChannels()
        self._pairs = PairTests(self, self._channels)

    # The worker's life

    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Adds `Prefill`."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    @property
    def calls_in_hand(self) -> int:
        """Prompts whose callers wait."""
        return len(self._calls)

    def peer_found(self, peer: PeerInfo) -> None:
        """Measures the way to a new life of a decode worker, and lets go of channels to earlier ones."""
        self._channels.replaced(peer.key)
        self.background(self._pairs.run(peer))

    def fail_all(self, error: PacelineError) -> None:
        """Ends every call with the error. An engine that is dead has stopped: that answers whoever waits for it."""
        for call in self._calls.values():
            call.fail(error)
        self._engine_dead = isinstance(error, EngineLost)
        for stop in self._stops.values():
            if stop.done():
                continue
            if self._engine_dead:
                stop.set_result(True)
            else:
                stop.set_exception(error)

    async def close(self) -> None:
        """Closes the channels to peers."""
        await self._channels.close()

    def reported(self, report: PrefillReport) -> None:
        """Hands the engine's events to whom they concern."""
        for event in report.events:
            match event:
                case Prefilled():
                    call = self._calls.get(event.attempt)
                    if call is not None and not call.answer.done():
                        call.answer.set_result(event)
                case PrefillFailed():
                    self._failed(event)
                case Measured():
                    self._pairs.measured(event)
                case Stopped():
                    stop = self._stops.get(event.call_id)
                    if stop is not None and not stop.done():
                        stop.set_result(event.found)

    # The service

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillResponse:
        """Computes a prompt; see the proto."""
        async with wire.answering_errors(context):
            log.bind(request_id=request.request_id, reservation=request.reservation_id)
            began = time.monotonic()
            command = await self.read(request, len(request.prompt), self._validated)
            peer = await self.registration.resolve(wire.key_from_proto(request.decode.worker))
            self._pairs.check(peer.key)
            done = await self._compute(command, peer)
            return prefill_pb2.PrefillResponse(
                tokens=done.tokens,
                finish=wire.finish_to_proto(done.finish),
                logprobs=[wire.logprob_to_proto(each) for each in done.logprobs],
                prompt_logprobs=[wire.logprob_to_proto(each) for each in done.prompt_logprobs],
                finishes=[wire.finish_to_proto(each) for each in done.finishes],
                load=wire.load_to_proto(self.load),
                cached_tokens=done.cached_tokens,
                duration=wire.duration(time.monotonic() - began),
                transfer=common_pb2.Transfer(
                    blocks=done.blocks,
                    bytes=done.num_bytes,
                    parts=done.parts,
                    parts_before_last_chunk=done.parts_before_last_chunk,
                ),
            )

    async def Abort(
        self, request: prefill_pb2.PrefillAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillAbortResponse:
        """Stops an attempt, and answers when it is terminal; see the proto."""
        async with wire.answering_errors(context):
            if request.epoch > self.key.epoch:
                raise StaleEpoch(f"this is {self.key}, and the later epoch {request.epoch} was meant")
            found = False
            # An earlier life is not ours to stop. Where it held our start lock, which `lock_id` tells, it is dead.
            if request.epoch == self.key.epoch:
                found = await self._stop(Attempt(ReservationId(request.reservation_id), request.attempt))
            return prefill_pb2.PrefillAbortResponse(
                epoch=self.key.epoch, lock_id=self.lock_id, found=found, load=wire.load_to_proto(self.load)
            )

    async def GetLoads(
        self, _request: prefill_pb2.PrefillGetLoadsRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillGetLoadsResponse:
        """The load now."""
        return prefill_pb2.PrefillGetLoadsResponse(load=wire.load_to_proto(self.load))

    async def GetServerInfo(
        self, _request: prefill_pb2.PrefillGetServerInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillGetServerInfoResponse:
        """Who this is."""
        return prefill_pb2.PrefillGetServerInfoResponse(server=self.server_info())

    async def SubscribeKvEvents(
        self, _request: prefill_pb2.PrefillSubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillSubscribeKvEventsResponse]:
        """What the prefix cache holds, and its changes; see the proto."""
        async with wire.answering_errors(context):
            async for event in self.kv_events.subscribe():
                yield prefill_pb2.PrefillSubscribeKvEventsResponse(event=event, epoch=self.key.epoch)

    async def Drain(
        self, _request: prefill_pb2.PrefillDrainRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillDrainResponse:
        """Takes nothing new; answers when nothing is left."""
        await self.drain()
        return prefill_pb2.PrefillDrainResponse(load=wire.load_to_proto(self.load))

    # The work

    def _validated(self, request: prefill_pb2.PrefillRequest) -> StartPrefill:
        self.admit(request.epoch)
        limits = self.ready.limits
        sampling = wire.sampling_from_proto(request.sampling, seed=0).validated(vocab_size=limits.vocab_size)
        prompt = request.prompt[:]  # a slice is a list, made at once
        check_prompt(prompt, max_tokens=1, limits=limits)
        if not request.reservation_id or request.attempt < 1:
            raise InvalidRequest("reservation_id", "a reservation and an attempt from 1 are needed")
        attempt = Attempt(ReservationId(request.reservation_id), request.attempt)
        return StartPrefill(
            attempt=attempt,
            prompt=prompt,
            sampling=sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    async def _compute(self, command: StartPrefill, peer: PeerInfo) -> Prefilled:
        attempt = command.attempt
        if attempt in self._calls:
            raise InvalidRequest("reservation_id", f"attempt {attempt} is in work already")
        call = self._calls[attempt] = _Call(peer)
        try:
            self.send(command)
            self.background(self._claim(attempt, call))
            return await call.answer
        except (asyncio.CancelledError, PacelineError):
            # Whoever asked is gone, or will not use it: the engine must not go on.
            self._abandon(attempt)
            raise
        finally:
            del self._calls[attempt]

    async def _claim(self, attempt: Attempt, call: _Call) -> None:
        """Claims the destination and tells the engine; a claim that fails, in whatever way, fails the call."""
        error: PacelineError = WorkerLost(f"the claim on {call.peer.key} was cut off")
        try:
            granted = await self._claimed(attempt, call)
            self.send(
                WriteTo(
                    attempt=attempt,
                    target=call.peer.key,
                    blocks=list(granted.blocks),
                    held_tokens=granted.held_tokens,
                    agent=granted.agent,
                    fingerprint=fingerprint_from_proto(granted.fingerprint),
                )
            )
            return
        except PacelineError as refusal:
            error = refusal
        except asyncio.CancelledError:
            # A channel closed under the call says so too: its worker was replaced.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        _log.info("claim refused", attempt=str(attempt), reason=error.reason, error=error.message)
        if call.answer.done() and call.answer.exception() is None:
            await self._tell_target(attempt, call.peer.key, error)
        call.fail(error)
        self._abandon(attempt)

    async def _claimed(self, attempt: Attempt, call: _Call) -> decode_pb2.ClaimWriteResponse:
        stub = decode_pb2_grpc.DecodeStub(self._channels.to(call.peer))
        request = decode_pb2.ClaimWriteRequest(
            reservation_id=attempt.reservation_id,
            attempt=attempt.number,
            decode_epoch=call.peer.key.epoch,
            writer=wire.key_to_proto(self.key),
            claim_token=self.claim_token,
            fingerprint=fingerprint_to_proto(self.ready.fingerprint),
        )
        deadline = time.monotonic() + _EARLY_CLAIM_S
        pause_s = _CLAIM_PAUSE_S
        while True:
            try:
                answer: decode_pb2.ClaimWriteResponse = await stub.ClaimWrite(request, timeout=_CLAIM_S)
                return answer
            except grpc.RpcError as error:
                translated = wire.error_from_rpc(error)
                if isinstance(translated, DeadlineExceeded):  # of this call, not the request's
                    translated = WorkerLost(f"{call.peer.key} did not answer a claim within {_CLAIM_S:g} s")
                given_up = call.answer.done() and call.answer.exception() is not None
                if not isinstance(translated, UnknownReservation) or given_up or time.monotonic() > deadline:
                    raise translated from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _CLAIM_PAUSE_MOST_S)

    def _failed(self, event: PrefillFailed) -> None:
        """A refusal, or a write that failed: after the answer was given, the decode worker must hear of it from us."""
        error = event.failure.error()
        self.metrics.refusals.labels(error.reason.lower()).inc()
        call = self._calls.get(event.attempt)
        if call is not None:
            call.fail(error)
        elif event.target is not None:
            self.background(self._tell_target(event.attempt, event.target, error))

    async def _tell_target(self, attempt: Attempt, target: WorkerKey, error: PacelineError) -> None:
        """The caller has its first token, and the KV will not come: the decode worker must not wait for it."""
        try:
            peer = await self.registration.resolve(target)
            stub = decode_pb2_grpc.DecodeStub(self._channels.to(peer))
            await stub.Retarget(
                decode_pb2.RetargetRequest(
                    reservation_id=attempt.reservation_id,
                    attempt=attempt.number,
                    to=decode_pb2.RETARGET_TO_REMOTE,
                ),
                timeout=_CLAIM_S,
            )
        except (grpc.RpcError, PacelineError) as failure:
            # Its own timer will tell it, a little later.
            _log.warning("failed write not told", attempt=str(attempt), reason=error.reason, error=str(failure))

    def _abandon(self, attempt: Attempt) -> None:
        self.background(self._stop_quietly(attempt))

    async def _stop_quietly(self, attempt: Attempt) -> None:
        """Until the engine has taken the order: what is not stopped keeps its blocks."""
        while True:
            try:
                await self._stop(attempt)
                return
            except Overloaded:
                await asyncio.sleep(_TELL_AGAIN_S)

    async def _stop(self, attempt: Attempt) -> bool:
        """Stops the attempt in the engine; returns when it is terminal, with whether it was known."""
        for known, call in self._calls.items():
            if known.reservation_id == attempt.reservation_id and attempt.number in (0, known.number):
                call.fail(RequestCancelled(f"attempt {known} was aborted"))
        if self._engine_dead:  # reaped: no write of this life can touch anything
            return True
        call_id = next(self._call_ids)
        stop: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._stops[call_id] = stop
        try:
            self.send(AbortAttempt(attempt=attempt, call_id=call_id))
            return await stop
        finally:
            del self._stops[call_id]


async def serve(config: PrefillConfig) -> int:
    """Runs a prefill worker until it is told to stop; returns the exit status."""
    front = PrefillFront(config)
    try:
        return await front.serve()
    finally:
        await front.close()
