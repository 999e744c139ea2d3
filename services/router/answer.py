"""One request's answer as it grows: tokens merged by index, turned into text, and cut at a stop string.

Both workers say the first token, and a retry says it again: each index counts once, whoever is first. A token that
comes early waits for those before it. One that contradicts what the client has is an error, not a silent splice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from paceline.errors import EngineError, WorkerLost
from paceline.services.router.words import TransferSum
from paceline.text import StopMatcher
from paceline.types import FinishReason, TokenLogprob, Usage, WorkerKey


class TextStream(Protocol):
    """Turns ids into text piece by piece."""

    def push(self, ids: Sequence[int], /) -> str:
        """The text that these ids complete, often empty in the middle of a character."""

    def flush(self) -> str:
        """What an unfinished character at the end turns into."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. Times are in seconds."""

    reason: FinishReason
    usage: Usage
    stop_text: str | None = None
    cumulative_logprob: float | None = None  # of the last choice, where log-probabilities were asked for
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    transfer: TransferSum = TransferSum()
    prefill_worker: WorkerKey | None = None
    decode_worker: WorkerKey | None = None
    prompt_tokens_computed_on_decode: int = 0
    attempts: int = 1


class ChoiceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one of several choices ended."""

    reason: FinishReason
    stop_text: str | None
    tokens: int
    text: str = ""  # that was held back
    cumulative_logprob: float | None = None  # the sum of its tokens', where they were asked for


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What is new for the client. `index` is the first token's in the answer; `summary` is in the last piece only."""

    text: str
    token_ids: tuple[int, ...]
    index: int
    summary: Summary | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of `token_ids`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in the first piece, where they were asked for
    end: ChoiceEnd | None = None  # in the last piece of a choice, unless it has the summary


class Answer:
    """The answer so far. `silent_ids` are never text: the stop ids, which end the answer. Text of the first
    `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(
        self, text: TextStream, *, stop: Sequence[str], silent_ids: Sequence[int], min_tokens: int = 0
    ) -> None:
        self._min_tokens = min_tokens
        self._logprobs: dict[int, TokenLogprob] = {}
        self._text = text
        self._matcher = StopMatcher(stop)
        self._silent_ids = frozenset(silent_ids)
        self._tokens: list[int] = []
        self._early: dict[int, int] = {}
        self.stop_text: str | None = None
        self.cumulative_logprob: float | None = None
        """The sum of the tokens' log-probabilities, where they were asked for."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the answer, the one that completed a stop string included."""
        return len(self._tokens)

    def add(self, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Piece | None:
        """Takes tokens from anywhere and returns what is new in order, if anything. After a stop nothing is new.

        Raises WorkerLost where a worker contradicts a token that is in the answer: another try may do better.
        """
        start = len(self._tokens)
        if index == start and not self._early:  # nearly always: what comes next, and nothing waits for it
            text = ""
            for token in ids:
                if self.stop_text is None:
                    text += self._append(token)
            found = tuple(logprobs[: len(self._tokens) - start])
        else:
            text, found = self._merge(index, ids, logprobs)
        if len(self._tokens) == start:
            return None
        if found:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(each.logprob for each in found)
        return Piece(text=text, token_ids=tuple(self._tokens[start:]), index=start, logprobs=found)

    def end(self, *, completion_tokens: int | None = None) -> str:
        """The text that was held back, at the answer's end.

        Raises EngineError where tokens before the end never came; `completion_tokens` is their number, if known.
        """
        if self.stop_text is not None:
            return ""
        if self._early or (completion_tokens is not None and completion_tokens > self.num_tokens):
            raise EngineError(f"the worker ended the answer, and token {self.num_tokens} of it never came")
        step = self._matcher.push(self._text.flush())
        self.stop_text = step.stop
        return step.text + self._matcher.flush()

    def _merge(
        self, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The text, and log-probabilities, of what follows now that these tokens are here too."""
        for offset, token in enumerate(ids):
            position = index + offset
            self._check(position, token)
            if position >= self.num_tokens:
                self._early[position] = token
                if logprobs:
                    self._logprobs[position] = logprobs[offset]
        start = self.num_tokens
        text = ""
        while self.stop_text is None and (token_or_none := self._early.pop(self.num_tokens, None)) is not None:
            text += self._append(token_or_none)
        if self.stop_text is not None:
            self._early.clear()
        new = range(start, self.num_tokens)
        return text, tuple(self._logprobs.pop(position) for position in new if position in self._logprobs)

    def _check(self, position: int, token: int) -> None:
        known = self._tokens[position] if position < self.num_tokens else self._early.get(position)
        if known is not None and known != token and self.stop_text is None:
            raise WorkerLost(f"a second computation chose another token at index {position}: the answer cannot go on")

    def _append(self, token: int) -> str:
        self._tokens.append(token)
        if token in self._silent_ids:
            return ""
        text = self._text.push((token,))
        if len(self._tokens) <= self._min_tokens:
            return text
        step = self._matcher.push(text)
        self.stop_text = step.stop
        return step.text
