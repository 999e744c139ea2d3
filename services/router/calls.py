"""The router's calls to one worker, in own types: the one place in the router's request path that speaks protobuf.

A call is cancelled explicitly, by `cancel`. Closing a worker's client (it restarted) fails its calls with WorkerLost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

import grpc

from paceline import wire
from paceline.errors import DeadlineExceeded, EngineError, PacelineError, WorkerLost
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from paceline.services.router.events import DecodeFailed
from paceline.services.router.from_proto import decode_event, load_of, prefill_reply
from paceline.services.router.registry import WorkerInfo
from paceline.services.router.token_stream import TokenStream
from paceline.services.router.words import DecodeEvent, DecodeFinished, Job, PrefillReply, RetargetOutcome
from paceline.types import ReservationId, Role

ABORT_TIMEOUT_S: Final = 5.0
"""Bound on Abort, which a live worker answers at once."""
RETARGET_TIMEOUT_S: Final = 30.0
"""Bound on Retarget, which a decode worker answers between two steps of its engine."""
_LATE_S: Final = 2.0
"""A worker's own deadline comes this much later than the router's, which is the one that is reported."""

_PROBE_S: Final = 1.0
"""Bound on the answer of a worker whose connection broke, or whose lease ended."""
_STATUS_S: Final = 1.0
"""Bound on the wait for a stream's status after its finish."""


class PrefillCall:
    """One Prefill in flight."""

    def __init__(self, call: Any, worker: WorkerInfo) -> None:
        self._call = call
        self._worker = worker

    async def reply(self) -> PrefillReply:
        """The answer, or the error it failed with."""
        async with _failing_as(self._worker):
            answer = await self._call
        return prefill_reply(answer)

    def cancel(self) -> None:
        """Ends the call; the worker sees it cancelled."""
        self._call.cancel()


class DecodeStream:
    """One Decode.Generate in flight. What is said of it comes over the worker's token stream, or over its own call."""

    def __init__(
        self,
        call: Any,
        worker: WorkerInfo,
        reservation_id: ReservationId,
        tokens: TokenStream,
        take: Callable[[DecodeEvent | DecodeFailed], None],
    ) -> None:
        """`take` is called for each thing said, in order; some may be said again, from the first one on. It never
        raises.
        """
        self._call = call
        self._worker = worker
        self._reservation_id = reservation_id
        self._tokens = tokens
        self._take = take
        tokens.join(reservation_id, self._hear)

    async def listen(self) -> None:
        """Hears what comes over the call itself, to its end: a failure, unless a finish came first."""
        try:
            async with _failing_as(self._worker):
                async for message in self._call:
                    event = decode_event(message)
                    if isinstance(event, DecodeFinished):
                        await self._end()
                        self._take(event)
                        return
                    self._take(event)
            raise WorkerLost(f"decode worker {self._worker.key} ended its stream without a finish")
        except PacelineError as error:
            self._take(DecodeFailed(error))

    def cancel(self) -> None:
        """Ends the call; the worker sees it cancelled, unless it has ended it."""
        self._tokens.leave(self._reservation_id)
        self._call.cancel()

    def _hear(self, message: decode_pb2.DecodeGenerateResponse) -> None:
        try:
            event: DecodeEvent | DecodeFailed = decode_event(message)
        except PacelineError as error:
            event = DecodeFailed(error)
        self._take(event)

    async def _end(self) -> None:
        """Waits for the status behind the finish, so that a worker that is done is not cancelled on its last line."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_S):
                await self._call.code()


class WorkerClient:
    """One life of one worker, as it is called. Close it once."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self._channel = grpc.aio.insecure_channel(info.address, options=wire.CHANNEL_OPTIONS)
        make_stub: Callable[[grpc.aio.Channel], Any] = cast(
            "Callable[[grpc.aio.Channel], Any]",
            prefill_pb2_grpc.PrefillStub if info.role is Role.PREFILL else decode_pb2_grpc.DecodeStub,
        )
        self._stub = make_stub(self._channel)
        # Without a serialiser: their requests are put together here, around a prompt that is encoded already.
        self._prefill: Callable[..., Any] = self._channel.unary_unary(
            "/paceline.v1.Prefill/Prefill", response_deserializer=prefill_pb2.PrefillResponse.FromString
        )
        self._generate: Callable[..., Any] = self._channel.unary_stream(
            "/paceline.v1.Decode/Generate", response_deserializer=decode_pb2.DecodeGenerateResponse.FromString
        )
        self._tokens = TokenStream(self._stub.StreamTokens, info) if info.role is Role.DECODE else None

    async def close(self) -> None:
        """Closes the channel; calls in flight fail with WorkerLost."""
        if self._tokens is not None:
            await self._tokens.close()
        await self._channel.close()

    async def lost(self) -> None:
        """Returns when a connection is lost, and this life of the worker does not answer on a new one."""
        while True:
            while (state := self._channel.get_state()) is not grpc.ChannelConnectivity.READY:
                await self._channel.wait_for_state_change(state)
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            if not await self.answers():
                return

    async def answers(self) -> bool:
        """True where this life of the worker answers, soon: another one at its address does not count."""
        prefills = self.info.role is Role.PREFILL
        request = prefill_pb2.PrefillGetServerInfoRequest if prefills else decode_pb2.DecodeGetServerInfoRequest
        try:
            answer = await self._stub.GetServerInfo(request(), timeout=_PROBE_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return False
        return wire.key_from_proto(answer.server.worker) == self.info.key

    def prefill(self, job: Job, *, attempt: int, decode: WorkerInfo) -> PrefillCall:
        """Starts the computation of a prompt for a reservation's attempt. Raises WorkerLost on a closed channel."""
        request = prefill_pb2.PrefillRequest(
            request_id=job.request_id,
            epoch=self.info.key.epoch,
            sampling=wire.sampling_to_proto(job.sampling),
            reservation_id=job.reservation_id,
            attempt=attempt,
            decode=target_to_proto(decode),
            timeout=wire.duration(job.timeout_s),
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        prompt = job.prompt.as_field(prefill_pb2.PrefillRequest.PROMPT_FIELD_NUMBER)
        return PrefillCall(self._call(self._prefill, request.SerializeToString() + prompt, job), self.info)

    def generate(self, job: Job, *, local: bool, take: Callable[[DecodeEvent | DecodeFailed], None]) -> DecodeStream:
        """Starts a request on a decode worker; `local`: it computes the prompt itself. Raises as `prefill` does."""
        assert self._tokens is not None, "a decode worker is asked to generate"
        request = decode_pb2.DecodeGenerateRequest(
            request_id=job.request_id,
            epoch=self.info.key.epoch,
            reservation_id=job.reservation_id,
            sampling=wire.sampling_to_proto(job.sampling),
            local=local,
            timeout=wire.duration(job.timeout_s),
            priority=job.priority,
            cache_salt=job.cache_salt,
            token_stream=self._tokens.name,
        )
        prompt = job.prompt.as_field(decode_pb2.DecodeGenerateRequest.PROMPT_FIELD_NUMBER)
        call = self._call(self._generate, request.SerializeToString() + prompt, job)
        return DecodeStream(call, self.info, job.reservation_id, self._tokens, take)

    def _call(self, method: Callable[..., Any], request: bytes, job: Job) -> Any:
        try:
            return method(request, timeout=job.timeout_s + _LATE_S)
        except grpc.aio.UsageError as error:  # the channel is closed
            raise WorkerLost(f"{self.info.role.value} worker {self.info.key} is gone") from error

    async def retarget(self, reservation_id: ReservationId, *, attempt: int, local: bool) -> RetargetOutcome:
        """Gives an attempt up: for another prefill worker, or for the decode worker itself."""
        request = decode_pb2.RetargetRequest(
            reservation_id=reservation_id,
            attempt=attempt,
            to=decode_pb2.RETARGET_TO_LOCAL if local else decode_pb2.RETARGET_TO_REMOTE,
        )
        async with _failing_as(self.info):
            answer = await self._stub.Retarget(request, timeout=RETARGET_TIMEOUT_S)
        load = load_of(answer)
        match answer.WhichOneof("outcome"):
            case "attempt":
                return RetargetOutcome(attempt=answer.attempt, load=load)
            case "local":
                return RetargetOutcome(local=True, load=load)
            case "already_landed":
                return RetargetOutcome(landed=True, load=load)
            case _:
                raise EngineError(f"decode worker {self.info.key} answered a retarget without an outcome")

    async def abort_decode(self, reservation_id: ReservationId, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, on a decode worker by its reservation."""
        async with _failing_as(self.info):
            await self._stub.Abort(
                decode_pb2.DecodeAbortRequest(reservation_id=reservation_id, choice=choice), timeout=ABORT_TIMEOUT_S
            )


def target_to_proto(info: WorkerInfo) -> common_pb2.Peer:
    """A decode worker, as a prefill worker is told of its target. What proves it comes from the registry alone."""
    return common_pb2.Peer(worker=wire.key_to_proto(info.key), role=wire.role_to_proto(info.role), address=info.address)


@asynccontextmanager
async def _failing_as(worker: WorkerInfo) -> AsyncIterator[None]:
    """Inside it, whatever gRPC raises becomes an own error that names the worker."""
    who = f"{worker.role.value} worker {worker.key}"
    try:
        yield
    except grpc.aio.AioRpcError as error:
        own = wire.error_from_rpc(error)
        if isinstance(own, DeadlineExceeded) and not wire.is_own(error):
            # A bound of this router's on the call; the request's own deadline is the relay's to tell.
            raise WorkerLost(f"{who} did not answer in time") from error
        raise (WorkerLost(f"{who} is lost: {own.message}") if type(own) is WorkerLost else own) from error
    except grpc.aio.UsageError as error:  # a call on a channel that is closed
        raise WorkerLost(f"{who} is gone") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody cancelled this task: the channel was closed under the call.
        raise WorkerLost(f"{who} is gone: it restarted") from None
