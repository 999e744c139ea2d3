"""A stream of token ids to a stream of text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from paceline.text.tokenizer import Tokenizer


class Detokenizer:
    """One choice's text, in pieces whose concatenation is `Tokenizer.decode` of all its ids.

    A character is emitted once its last byte is there, so that a piece has U+FFFD only where the whole has it. The work
    is linear in the bytes: nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, often empty in the middle of a character."""
        lookup = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(lookup(token_id, skip_special=self._skip_special) for token_id in ids))

    def flush(self) -> str:
        """What an unfinished character at the end turns into. Call it once, after the last `push`."""
        return self._decoder.decode(b"", final=True)
