"""What the engine reports of requests, as it goes to their callers over the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec

from paceline import wire
from paceline.protos import common_pb2, decode_pb2
from paceline.services.decode.messages import ChoiceOver, NewTokens, Over, Redirected, Reserved
from paceline.types import BLOCK_TOKENS, ReservationId, WorkerLoad

_MESSAGE_VALUES: Final = 32_768
"""Ids and log-probabilities in one message: some 16 bytes each, so far below what a message may be."""

StreamEvent: TypeAlias = Reserved | NewTokens | ChoiceOver | Redirected | Over
Load: TypeAlias = Callable[[], WorkerLoad]

Item = TypeVar("Item")


def reply(event: StreamEvent, load: Load) -> decode_pb2.DecodeGenerateResponse:
    """An event for its request's own call. Raises the failure that the request ended with."""
    message = decode_pb2.DecodeGenerateResponse()
    _write(message, event, load)
    return message


def messages(events: Sequence[StreamEvent], load: Load) -> Iterator[decode_pb2.StreamTokensResponse]:
    """Events of any requests for a token stream, those of one in their order. None is a failure."""
    message, room = decode_pb2.StreamTokensResponse(), _MESSAGE_VALUES
    for event in _joined_by_request(events):
        values = _values(event)
        if values > room and message.answers:
            yield message
            message, room = decode_pb2.StreamTokensResponse(), _MESSAGE_VALUES
        room -= values
        answer = message.answers.add()
        answer.reservation_id = event.reservation_id
        _write(answer.answer, event, load)
    if message.answers:
        yield message


def joined(events: Sequence[Item]) -> Iterator[Item]:
    """The events of one request, with tokens that follow each other in one choice as one: who is behind writes less.

    None is made longer than one message may be.
    """
    last: Item | None = None
    for event in events:
        if isinstance(last, NewTokens) and isinstance(event, NewTokens) and _continues(event, last):
            last = msgspec.structs.replace(last, ids=last.ids + event.ids, logprobs=last.logprobs + event.logprobs)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _joined_by_request(events: Sequence[StreamEvent]) -> Iterator[StreamEvent]:
    of: dict[ReservationId, list[StreamEvent]] = {}
    for event in events:
        of.setdefault(event.reservation_id, []).append(event)
    for each in of.values():
        yield from each if len(each) == 1 else joined(each)


def _continues(tokens: NewTokens, last: NewTokens) -> bool:
    follows = tokens.choice == last.choice and tokens.index == last.index + len(last.ids) and not tokens.prompt_logprobs
    return follows and _values(last) + _values(tokens) <= _MESSAGE_VALUES


def _values(event: StreamEvent) -> int:
    """What an event weighs: ids and log-probabilities."""
    if not isinstance(event, NewTokens):
        return 1
    if not (event.logprobs or event.prompt_logprobs):
        return len(event.ids)
    return len(event.ids) + sum(1 + len(each.top) for each in (*event.logprobs, *event.prompt_logprobs))


def _write(message: decode_pb2.DecodeGenerateResponse, event: StreamEvent, load: Load) -> None:
    match event:
        case NewTokens():
            # In place, and only what there is: this runs for every token, and nested constructors take 3 times as long.
            tokens = message.tokens
            tokens.ids.extend(event.ids)
            tokens.index = event.index
            if event.choice:
                tokens.choice = event.choice
            if event.logprobs:
                tokens.logprobs.extend(map(wire.logprob_to_proto, event.logprobs))
            if event.prompt_logprobs:
                tokens.prompt_logprobs.extend(map(wire.logprob_to_proto, event.prompt_logprobs))
        case Reserved():
            message.reserved.attempt = 1
            message.reserved.load.CopyFrom(wire.load_to_proto(load()))
        case ChoiceOver():
            message.choice_finish.choice = event.choice
            message.choice_finish.reason = wire.finish_to_proto(event.finish)
            message.choice_finish.completion_tokens = event.completion_tokens
        case Redirected():
            message.retargeted.CopyFrom(decode_pb2.Retargeted(attempt=event.attempt))
        case Over():
            if event.failure is not None:
                raise event.failure.error()
            message.finish.CopyFrom(_finish(event, load()))


def _finish(over: Over, load: WorkerLoad) -> decode_pb2.DecodeFinish:
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
        load=wire.load_to_proto(load),
        attempts=over.attempts,
    )
