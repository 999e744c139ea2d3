"""The answers of one request, one a choice: what a worker says goes to its choice, and comes out as pieces.

A choice ends by its worker's word or by a stop string found here; the others go on. The last piece of a choice says how
it ended, but for the last choice, whose end is the request's: its summary says so.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import msgspec

from paceline.errors import EngineError, WorkerLost
from paceline.services.router.answer import Answer, ChoiceEnd, Piece
from paceline.services.router.words import ChoiceFinished, NewTokens
from paceline.types import FinishReason, TokenLogprob


class Heard(enum.Enum):
    """What became of a choice with the words just taken."""

    GOES_ON = "goes_on"
    STOPPED = "stopped"  # by a stop string: its worker doesn't know, and other choices go on
    OVER = "over"  # so are all of them


class Answers(Protocol):
    """What a relay needs of its answers. `Choices` leave as they come; others may hold them back."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the last choice."""

    @property
    def last_reason(self) -> FinishReason | None:
        """Why the last choice ended, where that is known here."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the last choice's log-probabilities, where they were asked for."""

    def take(self, said: NewTokens | ChoiceFinished) -> tuple[list[Piece], Heard]:
        """What is new for the client, and what became of the choice."""

    def end(self, *, completion_tokens: int | None = None) -> Piece:
        """The last piece of all, without its summary; `completion_tokens` are all choices', if known."""


class Choices:
    """`count` answers, each made by `make`. With `scored_prompt` no piece leaves before the prompt's log-probabilities
    are there, which the first one carries.
    """

    def __init__(self, make: Callable[[], Answer], *, count: int = 1, scored_prompt: bool = False) -> None:
        self._answers = [make() for _ in range(count)]
        self.ends: dict[int, ChoiceEnd] = {}
        """How those choices ended that have."""
        self._last = 0  # the choice that was heard of last
        self._awaits_prompt = scored_prompt
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._held: list[Piece] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(answer.num_tokens for answer in self._answers)

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the last choice."""
        return self._answers[self._last].stop_text

    @property
    def last_reason(self) -> FinishReason | None:
        """Why the last choice ended, where that is known here."""
        end = self.ends.get(self._last)
        return None if end is None else end.reason

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the last choice's log-probabilities, where they were asked for."""
        return self._answers[self._last].cumulative_logprob

    def take(self, said: NewTokens | ChoiceFinished) -> tuple[list[Piece], Heard]:
        """What is new for the client. Raises as `Answer.add` does, and EngineError for a choice nobody asked for."""
        if said.choice >= len(self._answers):
            raise EngineError(f"a worker spoke of choice {said.choice}, and {len(self._answers)} were asked for")
        if isinstance(said, NewTokens) and said.prompt_logprobs and self._awaits_prompt:
            self._awaits_prompt = False
            self._prompt_logprobs = said.prompt_logprobs
        if said.choice in self.ends:
            return self._released([]), Heard.GOES_ON
        answer, pieces, heard = self._answers[said.choice], [], Heard.GOES_ON
        if isinstance(said, NewTokens):
            piece = answer.add(said.index, said.ids, said.logprobs)
            pieces = [] if piece is None else [piece]
            if answer.stop_text is not None:
                pieces += self._end(said.choice, FinishReason.STOP, None)
                heard = Heard.STOPPED
        else:
            pieces += self._end(said.choice, said.reason, said.completion_tokens)
        if len(self.ends) == len(self._answers):
            heard = Heard.OVER
        if said.choice:
            pieces = [msgspec.structs.replace(piece, choice=said.choice) for piece in pieces]
        return self._released(pieces), heard

    def end(self, *, completion_tokens: int | None = None) -> Piece:
        """The last piece of all, without its summary; `completion_tokens` are all choices', if known.

        Raises WorkerLost where the prompt's log-probabilities never came: another try may do better.
        """
        if self._awaits_prompt:
            raise WorkerLost("the prompt's log-probabilities were lost with its prefill worker")
        text = ""
        if len(self._answers) == 1 and not self.ends:
            text = self._answers[0].end(completion_tokens=completion_tokens)
        elif len(self.ends) < len(self._answers):
            raise EngineError(f"the worker ended the answer after {len(self.ends)} of {len(self._answers)} choices")
        else:
            text = self.ends[self._last].text
        return Piece(text=text, token_ids=(), index=self._answers[self._last].num_tokens, choice=self._last)

    def _end(self, choice: int, reason: FinishReason, completion_tokens: int | None) -> list[Piece]:
        """Notes the end of a choice; its last piece, unless it is the last choice."""
        answer = self._answers[choice]
        text = answer.end(completion_tokens=completion_tokens)
        reason = reason if answer.stop_text is None else FinishReason.STOP
        end = ChoiceEnd(
            reason=reason,
            stop_text=answer.stop_text,
            tokens=answer.num_tokens,
            text=text,
            cumulative_logprob=answer.cumulative_logprob,
        )
        self.ends[choice] = end
        self._last = choice
        if len(self.ends) == len(self._answers):
            return []
        return [Piece(text=text, token_ids=(), index=answer.num_tokens, end=end)]

    def _released(self, pieces: list[Piece]) -> list[Piece]:
        if not (self._awaits_prompt or self._held or self._prompt_logprobs):
            return pieces
        self._held += pieces
        if self._awaits_prompt or not self._held:
            return []
        released, self._held = self._held, []
        released[0] = msgspec.structs.replace(released[0], prompt_logprobs=self._prompt_logprobs)
        self._prompt_logprobs = ()
        return released
