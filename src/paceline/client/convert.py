"""Servers' messages as the client's own types, and the stubs. The client has generated code here and in `asking`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import wire
from paceline.client import types
from paceline.errors import EngineError, InvalidRequest, PacelineError, WorkerLost, quote
from paceline.protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from paceline.types import FinishReason, Role, Usage

# The generated stubs carry no types.
RouterStub: Final[Any] = router_pb2_grpc.RouterStub
HealthStub: Final[Any] = health_pb2_grpc.HealthStub

MODEL_INFO: Final = router_pb2.GetModelInfoRequest()
SERVER_INFO: Final = router_pb2.RouterGetServerInfoRequest()
LOADS: Final = router_pb2.RouterGetLoadsRequest()

_HEALTH: Final = {
    health_pb2.HealthCheckResponse.SERVING: types.Health.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: types.Health.NOT_SERVING,
}


def failure(error: grpc.RpcError, address: str) -> PacelineError:
    """The error behind a failed call. Where nobody answered at all it names the address."""
    found = wire.error_from_rpc(error)
    if type(found) is WorkerLost and not error.trailing_metadata():
        return WorkerLost(f"no answer from {address}: {found.message}")
    return found


def health_failure(error: grpc.RpcError, address: str, service: str) -> PacelineError:
    """The error behind a failed health check, which gRPC's own service answers: it has one of its own as well."""
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return InvalidRequest("service", f"{quote(service)} is none of the server at {address}")
    return failure(error, address)


class Closed:
    """In place of a closed client's stubs: any call of it raises InvalidRequest."""

    def __getattr__(self, method: str) -> Any:
        raise InvalidRequest("client", "it is closed")


def health_from_proto(response: Any) -> types.Health:
    """A health answer."""
    return _HEALTH.get(response.status, types.Health.UNKNOWN)


def worker_info_call(channel: Any, role: Role) -> tuple[Any, Any]:
    """(method, request) that ask a worker of the role about itself."""
    if role is Role.PREFILL:
        prefill: Any = prefill_pb2_grpc.PrefillStub
        return prefill(channel).GetServerInfo, prefill_pb2.PrefillGetServerInfoRequest()
    decode: Any = decode_pb2_grpc.DecodeStub
    return decode(channel).GetServerInfo, decode_pb2.DecodeGetServerInfoRequest()


def worker_load_call(channel: Any, role: Role) -> tuple[Any, Any]:
    """(method, request) that ask a worker of the role for its load."""
    if role is Role.PREFILL:
        prefill: Any = prefill_pb2_grpc.PrefillStub
        return prefill(channel).GetLoads, prefill_pb2.PrefillGetLoadsRequest()
    decode: Any = decode_pb2_grpc.DecodeStub
    return decode(channel).GetLoads, decode_pb2.DecodeGetLoadsRequest()


def chunk_from_proto(message: router_pb2.GenerateResponse) -> types.Chunk:
    """One piece of an answer."""
    return types.Chunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        index=message.token_index,
        choice=message.choice,
        finish=_finish(message.finish) if message.HasField("finish") else None,
        logprobs=tuple(wire.logprob_from_proto(each) for each in message.logprobs),
        prompt_logprobs=tuple(wire.logprob_from_proto(each) for each in message.prompt_logprobs),
    )


def _finish(message: router_pb2.Finish) -> types.Finish:
    return types.Finish(
        reason=wire.finish_from_proto(message.reason) or FinishReason.ERROR,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
        ),
        timings=_timings(message.timings),
        transfer=_transfer(message.transfer),
        prefill_worker=wire.key_from_proto(message.prefill_worker) if message.HasField("prefill_worker") else None,
        decode_worker=wire.key_from_proto(message.decode_worker) if message.HasField("decode_worker") else None,
        stop_text=message.stop_text if message.HasField("stop_text") else None,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        prompt_tokens_computed_on_decode=message.prompt_tokens_computed_on_decode,
        attempts=message.attempts,
    )


def _timings(message: common_pb2.Timings) -> types.Timings:
    return types.Timings(
        queued_s=wire.seconds(message.queued),
        prefill_s=wire.seconds(message.prefill),
        transfer_s=wire.seconds(message.transfer),
        first_token_s=wire.seconds(message.first_token),
        total_s=wire.seconds(message.total),
    )


def _transfer(message: common_pb2.Transfer) -> types.TransferSummary:
    return types.TransferSummary(
        blocks=message.blocks,
        bytes=message.bytes,
        parts=message.parts,
        parts_before_last_chunk=message.parts_before_last_chunk,
        duration_s=wire.seconds(message.duration),
        held_blocks=message.held_blocks,
    )


def completion(chunks: Sequence[types.Chunk]) -> types.Completion:
    """The whole answer, of all of its pieces; the last has the request's finish."""
    last = chunks[-1]
    assert last.finish is not None
    by_choice: dict[int, list[types.Chunk]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk.choice, []).append(chunk)
    choices = tuple(_choice(by_choice[choice]) for choice in sorted(by_choice))
    return types.Completion(
        request_id=last.request_id,
        text=choices[0].text,
        token_ids=choices[0].token_ids,
        finish=last.finish,
        logprobs=choices[0].logprobs,
        prompt_logprobs=tuple(each for chunk in chunks for each in chunk.prompt_logprobs),
        choices=choices,
    )


def _choice(chunks: Sequence[types.Chunk]) -> types.Choice:
    finish = chunks[-1].finish
    if finish is None:
        raise EngineError(f"choice {chunks[-1].choice} of the answer never ended")
    return types.Choice(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        reason=finish.reason,
        stop_text=finish.stop_text,
        cumulative_logprob=finish.cumulative_logprob,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
    )


def model_info_from_proto(message: router_pb2.GetModelInfoResponse) -> types.ModelInfo:
    """The model served."""
    return types.ModelInfo(
        model=message.model,
        limits=wire.limits_from_proto(message.limits),
        eos_token_ids=tuple(message.eos_token_ids),
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
    )


def server_info_from_proto(message: common_pb2.ServerInfo) -> types.ServerInfo:
    """A running process."""
    return types.ServerInfo(
        version=message.version,
        role=wire.role_from_proto(message.role) if message.role else None,
        worker=wire.key_from_proto(message.worker) if message.HasField("worker") else None,
        model=message.model,
        limits=wire.limits_from_proto(message.limits),
        uptime_s=wire.seconds(message.uptime),
        transport=message.transport,
        process_ids=tuple(message.process_ids),
    )


def loads_from_proto(message: router_pb2.RouterGetLoadsResponse) -> types.Loads:
    """The router's queue and its workers."""
    workers = [_worker(worker) for worker in message.workers]
    workers.sort(key=lambda worker: (worker.role is Role.DECODE, worker.key))
    return types.Loads(
        queued=message.queued,
        active=message.active,
        workers=tuple(workers),
        balance=_balance(message.balance) if message.HasField("balance") else None,
        obstacle=message.obstacle if message.HasField("obstacle") else None,
    )


def _balance(message: router_pb2.Balance) -> types.Balance:
    return types.Balance(
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        prefill_tokens_per_s=message.prefill_tokens_per_second,
        decode_tokens_per_s=message.decode_tokens_per_second,
        batch_requests=message.batch_requests,
        step_s=wire.seconds(message.step),
        step_per_request_s=wire.seconds(message.step_per_request),
        prefill_per_decode=message.prefill_per_decode,
    )


def _worker(message: router_pb2.RegisteredWorker) -> types.Worker:
    return types.Worker(
        key=wire.key_from_proto(message.info.worker),
        role=wire.role_from_proto(message.info.role),
        address=message.info.address,
        model=message.info.model,
        limits=wire.limits_from_proto(message.info.limits),
        load=wire.load_from_proto(message.load),
        heartbeat_age_s=wire.seconds(message.heartbeat_age),
        draining=message.draining,
    )
