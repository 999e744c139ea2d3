"""The one place where gRPC meets Paceline's own types: errors, channel options and message conversions.

Errors travel as a gRPC status with a `google.rpc.ErrorInfo` (domain `paceline`, the leaf's reason, its metadata) in the
trailing metadata. Code branches on the reason: gRPC makes some statuses of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from paceline import errors, types
from paceline.protos import common_pb2, router_pb2

ERROR_DOMAIN: Final = "paceline"
_DETAILS_KEY: Final = "grpc-status-details-bin"
MESSAGE_BYTES: Final = 16 * 2**20
"""Longest message that is sent or received."""

LIVENESS: Final = "paceline.liveness"
"""What every server's health service says of its process: SERVING from its start to its end. The empty name is the
server's readiness, which comes and goes."""

MOST_SECONDS: Final = 10**10
"""Longest time that is believed, some 300 years: protobuf takes no Duration over 315,576,000,000 s."""

_TOLD_BYTES: Final = 1_500
"""Longest message of an error, in UTF-8. It travels twice in the trailing metadata, once with each byte as up to three:
over 8 KiB of that, gRPC tells of RESOURCE_EXHAUSTED in place of the error."""

_LENGTH_DELIMITED: Final = 2
"""The wire type of packed numbers."""

_KEEPALIVE: Final[tuple[tuple[str, int], ...]] = (
    # Both sides ping, so that a peer that vanished is seen within 20 + 10 s even while nothing flows.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_KEEPALIVE,
    # A restarted worker is reached within a second, not after gRPC's two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels do not share sockets: a broken one takes nobody else's calls down.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_KEEPALIVE,
    # The server's default forbids pings under 300 s and answers them with GOAWAY, in the middle of a stream.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # Two processes on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
)

_FINISH: Final[Mapping[types.FinishReason, common_pb2.FinishReason]] = {
    types.FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    types.FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    types.FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_BACK: Final = {number: reason for reason, number in _FINISH.items()}
_ROLE: Final[Mapping[types.Role, common_pb2.Role]] = {
    types.Role.PREFILL: common_pb2.ROLE_PREFILL,
    types.Role.DECODE: common_pb2.ROLE_DECODE,
}
_ROLE_BACK: Final = {number: role for role, number in _ROLE.items()}


# ---- errors ----------------------------------------------------------------------------------------------------------


def status_code(error: errors.PacelineError) -> grpc.StatusCode:
    """The gRPC code of an error."""
    return grpc.StatusCode[error.status.name]


def error_metadata(error: errors.PacelineError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the error's reason and details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    detail = AnyMessage()
    detail.Pack(info)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status.name), message=_told(error), details=[detail])
    return ((_DETAILS_KEY, status.SerializeToString()),)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.PacelineError) -> NoReturn:
    """Ends a call on the server with the error."""
    await context.abort(status_code(error), _told(error), error_metadata(error))


def _told(error: errors.PacelineError) -> str:
    """The error's message, cut where a value in it is too long to be told."""
    encoded = error.message.encode(errors="replace")
    if len(encoded) <= _TOLD_BYTES:
        return error.message
    return f"{encoded[:_TOLD_BYTES].decode(errors='ignore')}… (cut, of {len(encoded)} bytes)"


@asynccontextmanager
async def answering_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Inside it, a PacelineError ends the call with its own status. Every servicer method stands in one."""
    try:
        yield
    except errors.PacelineError as error:
        await abort(context, error)


def error_from_rpc(error: grpc.RpcError) -> errors.PacelineError:
    """The error behind a failed call: the server's own by its reason, or gRPC's by its code."""
    own = _own_error(error)
    if own is not None:
        return own
    message = error.details() or str(error.code())
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.WorkerLost(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(message)
        case grpc.StatusCode.CANCELLED:
            return errors.RequestCancelled(message)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest("request", message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(message, retry_after_s=1.0)
        case code:
            return errors.EngineError(f"{code}: {message}")


def is_own(error: grpc.RpcError) -> bool:
    """True where a Paceline server ended the call with an error of the tree; False where gRPC itself did."""
    return _own_error(error) is not None


def _own_error(error: grpc.RpcError) -> errors.PacelineError | None:
    # The stubs know the synchronous client's named tuples only; the asynchronous one yields plain pairs.
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode("latin-1"))
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                    return errors.rebuild(info.reason, status.message, info.metadata)
    return None


# ---- values ----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> Duration:
    """A protobuf Duration, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """Seconds of a protobuf Duration, in its whole range: see `span` for what others say that something took."""
    return message.seconds + message.nanos / 1e9


def span(field: str, message: Duration) -> float:
    """Seconds that something took: InvalidRequest for what is negative, or too long to be sent on."""
    length = seconds(message)
    if not 0 <= length <= MOST_SECONDS:
        raise errors.InvalidRequest(field, f"{length:g} s is not from 0 to {MOST_SECONDS} s")
    return length


def key_to_proto(key: types.WorkerKey) -> common_pb2.WorkerKey:
    """A worker's key for the wire."""
    return common_pb2.WorkerKey(worker_id=key.worker_id, epoch=key.epoch)


def key_from_proto(message: common_pb2.WorkerKey) -> types.WorkerKey:
    """A worker's key from the wire."""
    return types.WorkerKey(message.worker_id, message.epoch)


def role_to_proto(role: types.Role) -> common_pb2.Role:
    """A tier for the wire."""
    return _ROLE[role]


def role_from_proto(number: common_pb2.Role) -> types.Role:
    """A tier from the wire, or InvalidRequest for an unspecified one."""
    role = _ROLE_BACK.get(number)
    if role is None:
        raise errors.InvalidRequest("role", f"{number} is not a worker's role")
    return role


def finish_to_proto(reason: types.FinishReason | None) -> common_pb2.FinishReason:
    """A finish reason for the wire; None is UNSPECIFIED."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def finish_from_proto(number: common_pb2.FinishReason) -> types.FinishReason | None:
    """A finish reason from the wire; UNSPECIFIED is None."""
    return _FINISH_BACK.get(number)


def limits_to_proto(limits: types.Limits) -> common_pb2.Limits:
    """A worker's limits for the wire."""
    return common_pb2.Limits(
        vocab_size=limits.vocab_size,
        context_tokens=limits.context_tokens,
        pool_blocks=limits.pool_blocks,
        most_blocks=_bounds_to_proto(limits.most_blocks),
        batch_requests=limits.batch_requests,
        step_weight_bytes=limits.step_weight_bytes,
        block_bytes=limits.block_bytes,
        windows=_bounds_to_proto(limits.windows),
    )


def limits_from_proto(message: common_pb2.Limits) -> types.Limits:
    """A worker's limits from the wire."""
    return types.Limits(
        vocab_size=message.vocab_size,
        context_tokens=message.context_tokens,
        pool_blocks=message.pool_blocks,
        most_blocks=_bounds_from_proto(message.most_blocks),
        batch_requests=message.batch_requests,
        step_weight_bytes=message.step_weight_bytes,
        block_bytes=message.block_bytes,
        windows=_bounds_from_proto(message.windows),
    )


def _bounds_to_proto(bounds: Sequence[int | None]) -> list[int]:
    """A bound for each KV group, 0 for none; nothing at all for the one group of most models, which has none."""
    return [] if tuple(bounds) == (None,) else [bound or 0 for bound in bounds]


def _bounds_from_proto(bounds: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(bound or None for bound in bounds) or (None,)


def load_to_proto(load: types.WorkerLoad) -> common_pb2.Load:
    """A worker's load for the wire."""
    return common_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        pending_prompt_tokens=load.pending_prompt_tokens,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        committed_blocks=load.committed_blocks,
        quarantined_blocks=load.quarantined_blocks,
        tick_age=duration(load.tick_age_ms / 1e3),
        kept_blocks=load.kept_blocks,
        work=common_pb2.Work(
            busy=duration(load.work.busy_s),
            steps=load.work.steps,
            prompt_tokens=load.work.prompt_tokens,
            generated_tokens=load.work.generated_tokens,
        ),
    )


def load_from_proto(message: common_pb2.Load) -> types.WorkerLoad:
    """A worker's load from the wire, or InvalidRequest for times that cannot be."""
    return types.WorkerLoad(
        running=message.running,
        waiting=message.waiting,
        pending_prompt_tokens=message.pending_prompt_tokens,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        committed_blocks=message.committed_blocks,
        quarantined_blocks=message.quarantined_blocks,
        tick_age_ms=span("load.tick_age", message.tick_age) * 1e3,
        kept_blocks=message.kept_blocks,
        work=types.Work(
            busy_s=span("load.work.busy", message.work.busy),
            steps=message.work.steps,
            prompt_tokens=message.work.prompt_tokens,
            generated_tokens=message.work.generated_tokens,
        ),
    )


# ---- a prompt for two messages ---------------------------------------------------------------------------------------


class EncodedIds:
    """A prompt's ids, encoded once for the several messages that carry them.

    Encoded protobuf messages are their fields one after another, in any order, and a list of ids looks the same in each
    but for the tag before it (https://protobuf.dev/programming-guides/encoding). Of 4,096 ids this saves each message
    some 200 us.
    """

    def __init__(self, ids: router_pb2.TokenIds) -> None:
        """Takes what is unknown here out of `ids`: it would be read as fields of the other messages."""
        ids.DiscardUnknownFields()
        # Behind the tag, one byte for field 1: the length, and the ids.
        self._content = ids.SerializeToString()[1:]

    def as_field(self, number: int) -> bytes:
        """The ids as field `number`, from 1 to 15, of a message: to be appended to its other fields, encoded."""
        assert 1 <= number <= 15, "the tag of such a field is one byte"
        return bytes((number << 3 | _LENGTH_DELIMITED,)) + self._content if self._content else b""


# ---- sampling --------------------------------------------------------------------------------------------------------

_OPTIONAL: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "logprobs",
    "prompt_logprobs",
)
"""Fields of one value, under the same name on both sides; one that is not set takes the default of the type."""


def sampling_from_proto(message: common_pb2.SamplingParams, *, seed: int) -> types.SamplingParams:
    """Sampling parameters off the wire, not yet validated; `seed` is used where the message has none.

    A beam search draws nothing, and so needs no word of temperature.
    """
    defaults = {"seed": seed, **({"temperature": 0.0} if message.HasField("beam_width") else {})}
    asked = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return types.SamplingParams(
        **{**defaults, **asked},
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def sampling_to_proto(sampling: types.SamplingParams) -> common_pb2.SamplingParams:
    """Sampling parameters for the wire, every field set."""
    return common_pb2.SamplingParams(
        **{name: getattr(sampling, name) for name in _OPTIONAL},
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
    )


def logprob_to_proto(
    logprob: types.TokenLogprob, text_of: Callable[[int], str | None] = lambda token_id: None
) -> common_pb2.TokenLogprob:
    """A token's log-probability for the wire, with the texts that `text_of` gives its ids."""
    top = [
        common_pb2.TokenLogprob(token_id=token_id, logprob=value, text=text_of(token_id))
        for token_id, value in logprob.top
    ]
    return common_pb2.TokenLogprob(
        token_id=logprob.token_id, logprob=logprob.logprob, top=top, text=text_of(logprob.token_id)
    )


def logprob_from_proto(message: common_pb2.TokenLogprob) -> types.TokenLogprob:
    """A token's log-probability from the wire."""
    return types.TokenLogprob(
        message.token_id,
        message.logprob,
        top=tuple((each.token_id, each.logprob) for each in message.top),
        text=message.text if message.HasField("text") else None,
        top_texts=tuple(each.text for each in message.top if each.HasField("text")),
    )
