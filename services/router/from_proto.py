"""What workers say, off the wire and in the router's own words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.duration_pb2 import Duration

from paceline import wire
from paceline.errors import EngineError, InvalidRequest
from paceline.protos import common_pb2, decode_pb2, prefill_pb2
from paceline.services.router.words import (
    ChoiceFinished,
    DecodeEvent,
    DecodeFinished,
    NewTokens,
    PrefillReply,
    Reserved,
    Retargeted,
    TransferSum,
)
from paceline.types import FinishReason, TokenLogprob, WorkerLoad


def prefill_reply(answer: prefill_pb2.PrefillResponse) -> PrefillReply:
    """A prefill worker's answer. Raises EngineError for times that cannot be."""
    return PrefillReply(
        tokens=tuple(answer.tokens),
        finish=wire.finish_from_proto(answer.finish),
        logprobs=_logprobs(answer.logprobs),
        prompt_logprobs=_logprobs(answer.prompt_logprobs),
        finishes=tuple(wire.finish_from_proto(each) or FinishReason.ERROR for each in answer.finishes),
        duration_s=_span("duration", answer.duration),
        cached_tokens=answer.cached_tokens,
        transfer=_transfer(answer.transfer),
        load=load_of(answer),
    )


def decode_event(message: decode_pb2.DecodeGenerateResponse) -> DecodeEvent:
    """An answer of a decode worker. Raises EngineError for one of a later kind, and for times that cannot be."""
    match message.WhichOneof("event"):
        case "tokens":
            said = message.tokens
            return NewTokens(
                index=said.index,
                ids=tuple(said.ids),
                choice=said.choice,
                logprobs=_logprobs(said.logprobs),
                prompt_logprobs=_logprobs(said.prompt_logprobs),
            )
        case "reserved":
            return Reserved(attempt=message.reserved.attempt, load=load_of(message.reserved))
        case "choice_finish":
            ended = message.choice_finish
            return ChoiceFinished(
                choice=ended.choice,
                reason=wire.finish_from_proto(ended.reason) or FinishReason.ERROR,
                completion_tokens=ended.completion_tokens,
            )
        case "retargeted":
            gave_up = message.retargeted
            return Retargeted(attempt=gave_up.attempt if gave_up.HasField("attempt") else None)
        case "finish":
            return _finished(message.finish)
        case _:
            raise EngineError("a decode worker sent a message of a kind that is not known here")


def load_of(message: Any) -> WorkerLoad | None:
    """The load that a message carries, if any. Raises EngineError for one that cannot be."""
    try:
        return wire.load_from_proto(message.load) if message.HasField("load") else None
    except InvalidRequest as error:
        raise _nonsense(error) from error


def _span(field: str, message: Duration) -> float:
    try:
        return wire.span(field, message)
    except InvalidRequest as error:
        raise _nonsense(error) from error


def _nonsense(error: InvalidRequest) -> EngineError:
    """A worker's fault, and not that of the client whose request it serves."""
    return EngineError(f"a worker sent what cannot be: {error.message}")


def _finished(message: decode_pb2.DecodeFinish) -> DecodeFinished:
    return DecodeFinished(
        reason=wire.finish_from_proto(message.reason) or FinishReason.ERROR,
        completion_tokens=message.completion_tokens,
        prompt_tokens_computed=message.prompt_tokens_computed,
        cached_tokens=message.cached_tokens,
        transfer=_transfer(message.transfer),
        attempts=message.attempts,
        load=load_of(message),
    )


def _logprobs(messages: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    # Asked first: nearly always there are none.
    return tuple([wire.logprob_from_proto(message) for message in messages]) if messages else ()


def _transfer(message: common_pb2.Transfer) -> TransferSum:
    return TransferSum(
        blocks=message.blocks,
        bytes=message.bytes,
        parts=message.parts,
        parts_before_last_chunk=message.parts_before_last_chunk,
        duration_s=_span("transfer.duration", message.duration),
        held_blocks=message.held_blocks,
    )
