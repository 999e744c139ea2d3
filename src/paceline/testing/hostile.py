"""Requests that no service may serve, each with the error that it must get: status, reason, and what the message names.

They go out as raw protobuf, past everything that the client would refuse by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from paceline import wire
from paceline.errors import PacelineError
from paceline.protos import common_pb2, router_pb2
from paceline.types import Limits

CALL_S: Final = 20.0
_GENERATE: Final = "/paceline.v1.Router/Generate"


@dataclass(frozen=True)
class Case:
    """One bad call. `call` makes it, on the channel of the service it is for, and raises grpc.RpcError."""

    name: str
    call: Callable[[grpc.Channel], object]
    status: str
    reason: str
    parts: tuple[str, ...] = ()

    def expected(self) -> tuple[str, ...]:
        """What `outcome` must contain."""
        return (f"{self.status} {self.reason}: ", *self.parts)

    def outcome(self, channel: grpc.Channel) -> str:
        """`STATUS REASON: message`, or what was answered where it was served."""
        try:
            answer = self.call(channel)
        except grpc.RpcError as error:
            return describe(error)
        return f"served: {str(answer)[:200]}"


def describe(error: grpc.RpcError) -> str:
    """A failed call as `STATUS REASON: message`."""
    failure: PacelineError = wire.error_from_rpc(error)
    return f"{error.code().name} {failure.reason}: {failure.message}"


def generate(message: router_pb2.GenerateRequest | bytes) -> Callable[[grpc.Channel], object]:
    """A call of Router.Generate, read to its end."""
    payload = message if isinstance(message, bytes) else message.SerializeToString()

    def call(channel: grpc.Channel) -> object:
        method: Any = channel.unary_stream(_GENERATE)  # without serializers: bytes in and out
        return list(method(payload, timeout=CALL_S))

    return call


def negative_id() -> bytes:
    """A request whose one token id is -1, as a client without types would write it: a varint of ten bytes."""
    varint = b"\xff" * 9 + b"\x01"
    tokens = b"\x0a" + bytes([len(varint)]) + varint  # TokenIds.ids, packed
    return b"\x22" + bytes([len(tokens)]) + tokens  # GenerateRequest.tokens


def router_cases(model: str, limits: Limits) -> Iterator[Case]:
    """Bad requests to a router that serves `model` within `limits`, whose pool is smaller than its context."""
    yield from _prompts(limits)
    yield from _sampling(limits)
    yield from _fields(model)


def _prompts(limits: Limits) -> Iterator[Case]:
    vocab, context, pool = limits.vocab_size, limits.context_tokens, limits.pool_blocks
    bad = ("INVALID_ARGUMENT", "INVALID_REQUEST")
    long = ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    yield Case("no prompt at all", generate(router_pb2.GenerateRequest()), *bad, ("prompt", "missing"))
    yield Case("no token ids", generate(ask([])), *bad, ("prompt", "empty"))
    yield Case("empty text", generate(router_pb2.GenerateRequest(text="")), *bad, ("prompt", "empty"))
    # gRPC answers this one, before any servicer sees it.
    corrupt = ("UNKNOWN", "ENGINE_ERROR", ("parsing", "GenerateRequest"))
    yield Case("bytes that are no message", generate(b"\xff\xff\xff\xff"), *corrupt)
    for token_id in (vocab, 10**9, 2**32 - 1):
        names = ("prompt", f"id {token_id} at index 1", f"[0, {vocab})")
        yield Case(f"id {token_id}", generate(ask([3, token_id])), *bad, names)
    yield Case("id -1", generate(negative_id()), *bad, ("prompt", f"id {2**32 - 1}", f"[0, {vocab})"))
    for length in (context, context + 1, 3 * context):
        yield Case(f"{length} ids", generate(ask([3] * length, max_tokens=1)), *long, (str(length), str(context)))
    parts: tuple[str, ...] = ("5 prompt tokens", f"max_tokens {context}", str(context + 5), f"context of {context}")
    yield Case("5 ids, max_tokens over the context", generate(ask([3] * 5, max_tokens=context)), *long, parts)
    over_pool = 16 * pool + 1
    parts = (f"{over_pool} prompt tokens", "max_tokens 1 ", f"need {pool + 1} KV blocks", f"pool has {pool}")
    yield Case("over the pool", generate(ask([3] * over_pool, max_tokens=1)), "INVALID_ARGUMENT", "EXCEEDS_POOL", parts)
    yield Case("3 million ids", generate(ask([3] * 3_000_000)), *long, ("3000000", str(context)))
    text = router_pb2.GenerateRequest(text="peloton " * 1_900_000)
    yield Case("15 MB of text", generate(text), *long, ("text", str(context)))
    huge = router_pb2.GenerateRequest(text="peloton " * 2_100_000)
    too_large = ("RESOURCE_EXHAUSTED", "OVERLOADED", (str(wire.MESSAGE_BYTES),))
    yield Case("16.8 MB of text", generate(huge), *too_large)


def _sampling(limits: Limits) -> Iterator[Case]:
    bad = ("INVALID_ARGUMENT", "INVALID_REQUEST")
    for value, shown in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (-1.0, "-1"), (101.0, "101")):
        yield Case(f"temperature {shown}", generate(ask(temperature=value)), *bad, ("temperature", shown, "0 to 100"))
    for value, shown in ((0.0, "0.0"), (-0.5, "-0.5"), (1.5, "1.5"), (math.nan, "nan")):
        yield Case(f"top_p {shown}", generate(ask(top_p=value)), *bad, ("top_p", shown, "(0, 1]"))
    yield Case("top_k -1", generate(ask(top_k=-1)), *bad, ("top_k", "-1", "negative"))
    yield Case("max_tokens 0", generate(ask(max_tokens=0)), *bad, ("max_tokens", "0", "limit of 1"))
    for token_id in (limits.vocab_size, 10**9, 2**32 - 1):
        parts = ("stop_token_ids", f"id {token_id}", f"[0, {limits.vocab_size})")
        yield Case(f"stop_token_ids {token_id}", generate(ask(stop_token_ids=[token_id])), *bad, parts)
    yield Case("an empty stop string", generate(ask(stop=["x", ""])), *bad, ("stop", "index 1", "empty"))
    yield Case("100 stop strings", generate(ask(stop=["x"] * 100)), *bad, ("stop", "100", "16"))
    out_of_range: dict[str, tuple[Any, ...]] = {
        "n": (0, 10**6),
        "best_of": (0, 10**6),
        "beam_width": (0, 33, 10**6),
        "logprobs": (21, 10**6),
        "prompt_logprobs": (21,),
        "min_p": (-0.5, 1.5, math.nan),
        "min_tokens": (5, 10**9),
        "repetition_penalty": (0.0, -1.0, math.inf),
        "presence_penalty": (2.5, -math.inf),
        "frequency_penalty": (-2.5, math.nan),
    }
    for name, settings in out_of_range.items():
        for setting in settings:
            yield Case(f"{name} {setting}", generate(ask(**{name: setting})), *bad, (name, str(setting), "from"))
    drawn: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "logit_bias": {3: 1.0}, "stop": ["x"], "best_of": 2}
    for name, setting in drawn.items():
        case = generate(ask(beam_width=2, **{name: setting}))
        yield Case(f"beam_width with {name}", case, *bad, (name, "cannot be had with beam_width"))
    for penalty in (math.nan, -11.0):
        case = generate(ask(beam_width=2, length_penalty=penalty))
        yield Case(f"length_penalty {penalty}", case, *bad, ("length_penalty", str(penalty), "-10 to 10"))
    for token_id, bias in ((limits.vocab_size, 1.0), (10**9, 5.0), (3, math.nan), (3, 1e9)):
        case = generate(ask(logit_bias={token_id: bias}))
        yield Case(f"logit_bias {token_id}: {bias}", case, *bad, ("logit_bias", str(token_id)))


def _fields(model: str) -> Iterator[Case]:
    bad = ("INVALID_ARGUMENT", "INVALID_REQUEST")
    other = ask()
    other.model = "gpt-5"
    yield Case("unknown model", generate(other), "NOT_FOUND", "UNKNOWN_MODEL", ("'gpt-5'", repr(model)))
    for request_id in ("two words", "x" * 129, "line\nbreak", "naïve"):
        request = ask()
        request.request_id = request_id
        yield Case(f"request_id {request_id[:12]!r}", generate(request), *bad, ("request_id", "128"))
    for seconds in (0, -1, 10**6):
        request = ask()
        request.timeout.seconds = seconds
        yield Case(f"timeout {seconds} s", generate(request), *bad, ("timeout", str(seconds), "86400"))
    yield Case("a chat without messages", generate(chat()), *bad, ("messages", "empty"))
    for role in ("", "root", "🦊", "x" * 5_000, "system\n"):
        yield Case(f"chat role {role[:8]!r}", generate(chat((role, "hi"))), *bad, ("role",))


def ask(ids: list[int] | None = None, **sampling: Any) -> router_pb2.GenerateRequest:
    """A request that is good but for what it is given."""
    return router_pb2.GenerateRequest(
        tokens=router_pb2.TokenIds(ids=[3, 4, 5] if ids is None else ids),
        sampling=common_pb2.SamplingParams(**{"max_tokens": 4, **sampling}),
    )


def chat(*turns: tuple[str, str]) -> router_pb2.GenerateRequest:
    """A conversation of (role, content)."""
    messages = [router_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return router_pb2.GenerateRequest(
        chat=router_pb2.Chat(messages=messages), sampling=common_pb2.SamplingParams(max_tokens=4)
    )
