"""Prompts as text, for servers that take no token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from paceline.checkpoint import resolve
from paceline.text.tokenizer import Tokenizer

_ROUNDS: Final = 8


class TextPrompts:
    """Texts of about as many tokens as were asked for. The server's own count is what figures are made of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, spec: str, *, cache_dir: Path) -> Self:
        """With the tokenizer of a model, named as for `paceline up`. Raises CheckpointError or FetchError."""
        return cls(Tokenizer.load(resolve(spec, cache_dir=cache_dir)))

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.tokenizer.vocab_size

    def of(self, ids: list[int]) -> str:
        """A text of as many tokens as there are `ids`, or nearly.

        Random ids seldom come back as they went: their text is cut into tokens anew. So what is over is cut off, what
        is missing is taken from the ids again, and the text of that is looked at, until the count is right.
        """
        wanted = len(ids)
        # Control tokens have no text.
        spare = [each for each in ids if self.tokenizer.token_bytes(each)] or self.tokenizer.encode("a", add_bos=False)
        text = self.tokenizer.decode(ids)
        for _ in range(_ROUNDS):
            found = self.tokenizer.encode(text)
            if len(found) == wanted:
                break
            text = self.tokenizer.decode(found[:wanted] + spare[: max(0, wanted - len(found))])
        return text
