"""The best of several answers: nothing leaves before all have ended, for until then nobody knows which they are."""

from __future__ import annotations

import msgspec

from paceline.services.router.answer import ChoiceEnd, Piece
from paceline.services.router.choices import Choices, Heard
from paceline.services.router.prompt import Best
from paceline.services.router.words import ChoiceFinished, NewTokens
from paceline.types import FinishReason, TokenLogprob


class BestOf:
    """`choices` that leave in the order of their mean log-probabilities, as many as `best` keeps. Equals leave in the
    order of their numbers.
    """

    def __init__(self, choices: Choices, best: Best) -> None:
        self._all = choices
        self._best = best
        self._pieces: dict[int, list[Piece]] = {}
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._ranked: list[int] = []  # once all have ended

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices, the rejected ones among them."""
        return self._all.num_tokens

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the last of the best."""
        return self._final.stop_text if self._ranked else None

    @property
    def last_reason(self) -> FinishReason | None:
        """Why the last of the best ended."""
        return self._final.reason if self._ranked else None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the last of the best, where they were asked for."""
        return self._final.cumulative_logprob if self._ranked and self._best.show_logprobs else None

    def take(self, said: NewTokens | ChoiceFinished) -> tuple[list[Piece], Heard]:
        """As `Choices.take`; every piece comes with the last word."""
        pieces, heard = self._all.take(said)
        for piece in pieces:
            self._prompt_logprobs = self._prompt_logprobs or piece.prompt_logprobs
            if piece.token_ids:
                self._pieces.setdefault(piece.choice, []).append(piece)
        if heard is not Heard.OVER or self._ranked:
            return [], heard
        self._ranked = sorted(self._all.ends, key=lambda choice: (-self._mean(choice), choice))[: self._best.keep]
        return [self._whole(rank, choice) for rank, choice in enumerate(self._ranked)], heard

    def end(self, *, completion_tokens: int | None = None) -> Piece:
        """As `Choices.end`."""
        self._all.end(completion_tokens=completion_tokens)
        return Piece(text="", token_ids=(), index=self._final.tokens, choice=len(self._ranked) - 1)

    @property
    def _final(self) -> ChoiceEnd:
        return self._all.ends[self._ranked[-1]]

    def _mean(self, choice: int) -> float:
        logprobs = [each.logprob for piece in self._pieces.get(choice, ()) for each in piece.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    def _whole(self, rank: int, choice: int) -> Piece:
        pieces, end = self._pieces.get(choice, []), self._all.ends[choice]
        if not self._best.show_logprobs:
            end = msgspec.structs.replace(end, cumulative_logprob=None)
        logprobs = tuple(each for piece in pieces for each in piece.logprobs)
        return Piece(
            text="".join(piece.text for piece in pieces) + end.text,
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            index=0,
            choice=rank,
            logprobs=logprobs if self._best.show_logprobs else (),
            prompt_logprobs=self._prompt_logprobs if rank == 0 else (),
            end=end if rank < self._best.keep - 1 else None,
        )
