"""Log-probabilities of prompt tokens, a few rows of logits at a time: never [prompt, vocab] at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from paceline import kernels
from paceline.engine.logprobs import token_logprobs
from paceline.engine.request import Chunk
from paceline.types import TokenLogprob

PIECE_ELEMENTS: Final = 2**22
"""Logits held at once for scoring: 16 MiB."""


class Scoring:
    """The rows of a step whose next token is a prompt's, of requests that want it scored."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.rows: list[int] = []
        """Rows of the batch, in the order in which `take` gets their logits."""
        self._owners: list[int] = []
        self._targets: list[int] = []
        self._asked: list[int] = []
        self._found: list[TokenLogprob | None] = []
        first_row = 0
        for index, chunk in enumerate(chunks):
            request, asked = chunk.request, chunk.request.sampling.prompt_logprobs
            if asked is not None and request.scores is not None:
                for position in range(chunk.start, min(chunk.end, request.num_prompt - 1)):
                    self.rows.append(first_row + position - chunk.start)
                    self._owners.append(index)
                    self._targets.append(request.tokens[position + 1])
                    self._asked.append(asked)
            first_row += chunk.num_tokens

    def take(self, logits: Tensor) -> None:
        """The logits [rows, vocab] of the next of `rows`."""
        done = len(self._found)
        end = done + len(logits)
        self._found += token_logprobs(logits, self._targets[done:end], self._asked[done:end])

    def found(self) -> Iterator[tuple[int, TokenLogprob]]:
        """(index of the chunk, score) of each row."""
        for owner, score in zip(self._owners, self._found, strict=True):
            assert score is not None, "every row that is scored was asked for"
            yield owner, score


def head_logits(hidden: Tensor, lm_head: Tensor, num_samples: int, scoring: Scoring) -> Tensor:
    """A model's last product: logits [samples, vocab], float32, of the first `num_samples` rows of `hidden`.

    The other rows are those that `scoring` gets.
    """
    rows = max(1, PIECE_ELEMENTS // lm_head.shape[0])
    for start in range(num_samples, hidden.shape[0], rows):
        scoring.take(kernels.linear(hidden[start : start + rows], lm_head).float())
    return kernels.linear(hidden[:num_samples], lm_head).float()
