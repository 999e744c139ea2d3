"""Between the client's own types and the router's messages. The client touches generated code here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

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

Prompt = str | Sequence[int]

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


def check_timeout(timeout: float) -> None:
    """Raises InvalidRequest for a number of seconds that is no time to wait."""
    if not 0 < timeout < 1e9:
        raise InvalidRequest("timeout", f"{timeout:g} is not a positive number of seconds")


class Closed:
    """In place of a closed client's stubs: any call of it raises InvalidRequest."""

    def __getattr__(self, method: str) -> Any:
        raise InvalidRequest("client", "it is closed")


def generate_request(
    prompt: Prompt | Sequence[types.Message],
    *,
    sampling: types.Sampling,
    request_id: str,
    timeout: float | None,
    model: str,
    priority: int | None,
    cache_salt: str = "",
) -> router_pb2.GenerateRequest:
    """The message for one generation; InvalidRequest for a value that does not even fit into it."""
    request = router_pb2.GenerateRequest(
        request_id=request_id, model=model, sampling=_sampling(sampling), cache_salt=cache_salt
    )
    _set_prompt(request, prompt)
    if timeout is not None:
        check_timeout(timeout)
        request.timeout.CopyFrom(wire.duration(timeout))
    if priority is not None:
        try:
            request.priority = priority
        except (TypeError, ValueError) as error:
            raise InvalidRequest("priority", f"{quote(priority)} is not accepted: {error}") from error
    return request


def _set_prompt(request: router_pb2.GenerateRequest, prompt: Prompt | Sequence[types.Message]) -> None:
    if isinstance(prompt, str):
        request.text = _sendable("prompt", prompt)
    elif prompt and all(isinstance(turn, types.Message) for turn in prompt):
        turns = [turn for turn in prompt if isinstance(turn, types.Message)]
        request.chat.messages.extend(
            router_pb2.ChatMessage(
                role=_sendable(f"role of message {index}", turn.role),
                content=_sendable(f"content of message {index}", turn.content),
            )
            for index, turn in enumerate(turns)
        )
    else:
        # An empty list travels as an empty prompt, so that the router has the one say on it.
        request.tokens.SetInParent()
        try:
            # At once: one by one, long prompts hold an event loop up for milliseconds.
            request.tokens.ids.extend(cast(Sequence[int], prompt))
        except (TypeError, ValueError) as error:
            raise _wrong_token_id(prompt) from error


def check_messages(messages: object) -> None:
    """Raises InvalidRequest for what is no list of Messages: a text, or dictionaries, say."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", f"{quote(messages)} is not a list of Messages: Message(role, content)")
    for index, turn in enumerate(messages):
        if not isinstance(turn, types.Message):
            raise InvalidRequest("messages", f"{quote(turn)} at index {index} is not a Message(role, content)")


def _sendable(field: str, text: str) -> str:
    """The text. Raises InvalidRequest where it has halves of characters, as bytes that are not UTF-8 become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not UTF-8 at character {error.start}") from error
    return text


def _wrong_token_id(prompt: Sequence[object]) -> InvalidRequest:
    for index, token_id in enumerate(prompt):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**32:
            return InvalidRequest("prompt", f"id {quote(token_id)} at index {index} is not a token id")
    return InvalidRequest("prompt", f"{quote(prompt)} is not a list of token ids")


def _sampling(sampling: types.Sampling) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    for name, value in sampling.items():
        if value is None:
            continue
        field: dict[str, Any] = {name: [value] if name == "stop" and isinstance(value, str) else value}
        try:
            message.MergeFrom(common_pb2.SamplingParams(**field))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(name, f"{quote(value)} is not accepted: {error}") from error
    return message


def abort_request(request_id: str) -> router_pb2.RouterAbortRequest:
    """The message that ends a request."""
    return router_pb2.RouterAbortRequest(request_id=request_id)


def health_request(service: str) -> Any:
    """The message that asks for the health of one service, or of the whole server for an empty name."""
    return health_pb2.HealthCheckRequest(service=service)


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
