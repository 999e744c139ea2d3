"""What the caller of one request was told where nobody knows whether it arrived, to be told again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline.services.decode.messages import ChoiceOver, NewTokens, Over
from paceline.services.decode.replies import StreamEvent
from paceline.types import ReservationId, TokenLogprob

_SLICE: Final = 1_024
"""Tokens of one event: with their log-probabilities they are one message, of which many would be too long."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(TokenLogprob).decode


@dataclass
class _Tokens:
    """One choice's, from the first one on."""

    ids: array[int] = field(default_factory=lambda: array("I"))  # 4 bytes a token: every answer in hand is kept
    logprobs: list[bytes] = field(default_factory=list)  # encoded: as objects they take 5 times as much
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Told:
    """All events of one request so far. A choice's tokens are its first ones, and leave no gap."""

    def __init__(self, reservation_id: ReservationId) -> None:
        self._reservation_id = reservation_id
        self._before: list[StreamEvent] = []
        self._tokens: dict[int, _Tokens] = {}
        self._ends: list[ChoiceOver | Over] = []

    def note(self, event: StreamEvent) -> None:
        """Adds what was told."""
        if isinstance(event, NewTokens):
            tokens = self._tokens.get(event.choice)
            if tokens is None:
                tokens = self._tokens[event.choice] = _Tokens()
            assert event.index == len(tokens.ids), "tokens are told once and in order"
            tokens.ids.extend(event.ids)
            if event.logprobs:
                tokens.logprobs.extend(map(_encode, event.logprobs))
            if event.prompt_logprobs:
                tokens.prompt_logprobs = event.prompt_logprobs
        elif isinstance(event, (ChoiceOver, Over)):
            self._ends.append(event)
        else:
            self._before.append(event)

    def again(self) -> list[StreamEvent]:
        """The same from the beginning: each choice's tokens in few events, before the ends."""
        tokens = [event for choice, each in self._tokens.items() for event in self._slices(choice, each)]
        return [*self._before, *tokens, *self._ends]

    def _slices(self, choice: int, tokens: _Tokens) -> Iterator[NewTokens]:
        for index in range(0, max(1, len(tokens.ids)), _SLICE):
            yield NewTokens(
                reservation_id=self._reservation_id,
                ids=tokens.ids[index : index + _SLICE].tolist(),
                index=index,
                choice=choice,
                logprobs=tuple(map(_decode, tokens.logprobs[index : index + _SLICE])),
                prompt_logprobs=tokens.prompt_logprobs if index == 0 else (),
            )
