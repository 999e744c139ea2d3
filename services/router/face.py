"""The router's gRPC service: protobuf in, own types within, protobuf out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

import grpc

import paceline
from paceline import wire
from paceline.errors import Draining, InvalidRequest, Overloaded, PacelineError, RequestCancelled, quote
from paceline.log import bound
from paceline.protos import common_pb2, router_pb2, router_pb2_grpc
from paceline.services.router.answer import Answer, ChoiceEnd, Piece, Summary
from paceline.services.router.balance import Balance
from paceline.services.router.best_of import BestOf
from paceline.services.router.choices import Answers, Choices
from paceline.services.router.enrolment import peer_to_proto, read_key, read_worker, worker_to_proto
from paceline.services.router.prompt import PromptReader, Request, read_request_id
from paceline.services.router.reading import Reading
from paceline.services.router.relay import Means, Relay
from paceline.types import RequestId, Role

_READINGS_OVER_QUEUE: Final = 64
"""So many prompts may be read at once beyond those that could wait: with a short queue, bursts are read still."""

Context = grpc.aio.ServicerContext[Any, Any]


class RouterFace(router_pb2_grpc.RouterServicer):
    """The servicer `paceline.v1.Router`."""

    def __init__(
        self, means: Means, reader: PromptReader, *, lease_s: float, heartbeat_s: float, queue_size: int
    ) -> None:
        self._means = means
        self._reader = reader
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._live: dict[RequestId, Reading | Relay] = {}
        self._most_readings = queue_size + _READINGS_OVER_QUEUE
        self._readings = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._started = asyncio.get_running_loop().time()

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:
        """Serves one request and streams its answer."""
        async with wire.answering_errors(context):
            request_id = self._enter(request.request_id)
            try:
                with bound(request_id=request_id):
                    await self._serve(request, request_id, context)
            finally:
                del self._live[request_id]
                if not self._live:
                    self._idle.set()

    async def Abort(self, request: router_pb2.RouterAbortRequest, context: Context) -> router_pb2.RouterAbortResponse:
        """Ends a request by its id."""
        live = self._live.get(RequestId(request.request_id))
        if live is not None:
            live.interrupt(RequestCancelled("the request was aborted by its id"))
        return router_pb2.RouterAbortResponse(found=live is not None)

    async def drain(self, *, grace_s: float) -> None:
        """Refuses new requests, and returns when those in hand have ended, or were cut off after `grace_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for request in self._live.values():
                request.interrupt(Draining(f"the router stops, and its grace of {grace_s:g} s is over"))

    def _enter(self, asked: str) -> RequestId:
        if self._draining:
            raise Draining("the router is stopping and takes no new requests")
        request_id = read_request_id(asked)
        if request_id in self._live:
            raise InvalidRequest("request_id", f"{quote(request_id)} is in use by a request that has not ended")
        if self._readings >= self._most_readings:
            raise Overloaded(
                f"{self._readings} prompts are being read, and the limit is {self._most_readings}",
                retry_after_s=self._means.admission.retry_after_s,
            )
        self._live[request_id] = Reading()
        self._idle.clear()
        return request_id

    async def _serve(self, message: router_pb2.GenerateRequest, request_id: RequestId, context: Context) -> None:
        arrived = self._now
        means = self._means
        try:
            request = await self._read(message, request_id)
        except PacelineError as error:
            means.metrics.requests.labels(error.reason.lower()).inc()
            raise
        means.metrics.prompt_tokens.inc(len(request.prompt))
        sampling = request.sampling

        def answer() -> Answer:
            text = self._reader.text_stream()
            silent_ids = sampling.stop_token_ids
            return Answer(text, stop=request.stop, silent_ids=silent_ids, min_tokens=sampling.min_tokens)

        scored = sampling.prompt_logprobs is not None and len(request.prompt) > 1

        def answers() -> Answers:
            choices = Choices(answer, count=sampling.n, scored_prompt=scored)
            return choices if request.best is None else BestOf(choices, request.best)

        async def write(piece: Piece) -> None:
            try:
                await context.write(piece_to_proto(request_id, piece, self._reader.token_text))
            except grpc.aio.BaseError as error:
                raise RequestCancelled("the client is gone") from error

        relay = self._live[request_id] = Relay(request, answers, means, write, arrived=arrived)
        await relay.run()

    async def _read(self, message: router_pb2.GenerateRequest, request_id: RequestId) -> Request:
        reading = self._live[request_id]
        assert isinstance(reading, Reading), "a request is read before it is relayed"
        timeout_s = self._reader.timeout_s(message)
        limits = self._means.fleet.limits(self._means.own_limits)
        self._readings += 1
        try:
            return await reading.run(
                self._reader.read(message, request_id=request_id, limits=limits), timeout_s=timeout_s
            )
        finally:
            self._readings -= 1

    # ---- what is known -----------------------------------------------------------------------------------------------

    async def GetModelInfo(
        self, request: router_pb2.GetModelInfoRequest, context: Context
    ) -> router_pb2.GetModelInfoResponse:
        """The model, and the limits that are enforced."""
        return router_pb2.GetModelInfoResponse(
            model=self._reader.model,
            limits=wire.limits_to_proto(self._means.fleet.limits(self._means.own_limits)),
            eos_token_ids=self._reader.tokenizer.eos_token_ids,
            has_tokenizer=self._reader.tokenizer.has_text,
            has_chat_template=self._reader.has_chat_template,
        )

    async def GetServerInfo(
        self, request: router_pb2.RouterGetServerInfoRequest, context: Context
    ) -> router_pb2.RouterGetServerInfoResponse:
        """This process."""
        return router_pb2.RouterGetServerInfoResponse(
            server=common_pb2.ServerInfo(
                version=paceline.__version__,
                model=self._reader.model,
                limits=wire.limits_to_proto(self._means.fleet.limits(self._means.own_limits)),
                uptime=wire.duration(self._now - self._started),
                process_ids=[os.getpid()],
            )
        )

    async def GetLoads(
        self, request: router_pb2.RouterGetLoadsRequest, context: Context
    ) -> router_pb2.RouterGetLoadsResponse:
        """The queue, and every live worker."""
        queued = len(self._means.admission)
        workers = [
            router_pb2.RegisteredWorker(
                info=worker_to_proto(worker.info),
                load=wire.load_to_proto(worker.load),
                heartbeat_age=wire.duration(self._now - worker.last_seen),
                draining=worker.draining,
            )
            for worker in sorted(self._means.fleet.registry, key=lambda worker: worker.info.key)
        ]
        balance = self._means.fleet.balance
        return router_pb2.RouterGetLoadsResponse(
            queued=queued,
            active=len(self._live) - queued,
            workers=workers,
            balance=None if balance is None else balance_to_proto(balance),
            obstacle=self.obstacle,
        )

    @property
    def obstacle(self) -> str | None:
        """Why no request that came now could be placed, in words; None where one could, though it may wait for room."""
        return "the router is stopping" if self._draining else self._means.fleet.obstacle

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def Register(self, request: router_pb2.RegisterRequest, context: Context) -> router_pb2.RegisterResponse:
        """Makes a worker known."""
        async with wire.answering_errors(context):
            info = read_worker(request.info, model=self._reader.model)
            self._means.fleet.register(info, wire.load_from_proto(request.load), draining=request.draining)
            return router_pb2.RegisterResponse(
                lease=wire.duration(self._lease_s),
                heartbeat=wire.duration(self._heartbeat_s),
                peers=self._peers(info.role),
            )

    async def Heartbeat(self, request: router_pb2.HeartbeatRequest, context: Context) -> router_pb2.HeartbeatResponse:
        """Renews a worker's lease."""
        heartbeats = self._means.metrics.heartbeats
        async with wire.answering_errors(context):
            try:
                worker = self._means.fleet.heartbeat(
                    read_key(request.worker), wire.load_from_proto(request.load), draining=request.draining
                )
            except PacelineError:
                heartbeats.labels("unknown").inc()
                raise
            heartbeats.labels("ok").inc()
            return router_pb2.HeartbeatResponse(peers=self._peers(worker.info.role))

    def _peers(self, role: Role) -> list[common_pb2.Peer]:
        return [peer_to_proto(info) for info in self._means.fleet.registry.peers(role)]

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def balance_to_proto(balance: Balance) -> router_pb2.Balance:
    """The estimate for the wire."""
    return router_pb2.Balance(
        prompt_tokens=balance.prompt_tokens,
        generated_tokens=balance.generated_tokens,
        prefill_tokens_per_second=balance.prefill_tokens_per_s,
        decode_tokens_per_second=balance.decode_tokens_per_s,
        batch_requests=balance.batch_requests,
        step=wire.duration(balance.step_s),
        step_per_request=wire.duration(balance.step_per_request_s),
        prefill_per_decode=balance.prefill_per_decode,
    )


def piece_to_proto(
    request_id: RequestId, piece: Piece, token_text: Callable[[int], str | None]
) -> router_pb2.GenerateResponse:
    """A piece for the wire. `token_text` gives the text of a token by itself."""
    message = router_pb2.GenerateResponse(
        request_id=request_id,
        text=piece.text,
        token_ids=piece.token_ids,
        token_index=piece.index,
        choice=piece.choice,
    )
    # The rest where there is any: this runs for every token.
    if piece.logprobs:
        message.logprobs.extend(wire.logprob_to_proto(each, token_text) for each in piece.logprobs)
    if piece.prompt_logprobs:
        message.prompt_logprobs.extend(wire.logprob_to_proto(each, token_text) for each in piece.prompt_logprobs)
    if piece.summary is not None:
        message.finish.CopyFrom(summary_to_proto(piece.summary))
    elif piece.end is not None:
        message.finish.CopyFrom(end_to_proto(piece.end))
    return message


def end_to_proto(end: ChoiceEnd) -> router_pb2.Finish:
    """The end of one of several choices for the wire."""
    return router_pb2.Finish(
        reason=wire.finish_to_proto(end.reason),
        usage=common_pb2.Usage(completion_tokens=end.tokens),
        stop_text=end.stop_text,
        cumulative_logprob=end.cumulative_logprob,
    )


def summary_to_proto(summary: Summary) -> router_pb2.Finish:
    """The last piece's summary for the wire."""
    transfer = summary.transfer
    prefill, decode = summary.prefill_worker, summary.decode_worker
    return router_pb2.Finish(
        reason=wire.finish_to_proto(summary.reason),
        usage=common_pb2.Usage(
            prompt_tokens=summary.usage.prompt_tokens,
            completion_tokens=summary.usage.completion_tokens,
            cached_tokens=summary.usage.cached_tokens,
        ),
        stop_text=summary.stop_text,
        cumulative_logprob=summary.cumulative_logprob,
        timings=common_pb2.Timings(
            queued=wire.duration(summary.queued_s),
            prefill=wire.duration(summary.prefill_s),
            transfer=wire.duration(transfer.duration_s),
            first_token=wire.duration(summary.first_token_s),
            total=wire.duration(summary.total_s),
        ),
        transfer=common_pb2.Transfer(
            blocks=transfer.blocks,
            bytes=transfer.bytes,
            parts=transfer.parts,
            parts_before_last_chunk=transfer.parts_before_last_chunk,
            duration=wire.duration(transfer.duration_s),
            held_blocks=transfer.held_blocks,
        ),
        prefill_worker=None if prefill is None else wire.key_to_proto(prefill),
        decode_worker=None if decode is None else wire.key_to_proto(decode),
        prompt_tokens_computed_on_decode=summary.prompt_tokens_computed_on_decode,
        attempts=summary.attempts,
    )
