"""Keeps what users write from becoming control tokens on its way through a chat template.

A template mixes its own control tokens with user fields, and may trim, split and compare those fields, so the fields
must reach it nearly as they are. A mark, a private-use character that no field contains, is put behind every character
of a field that could begin a control token; control tokens are then looked for in the rendered text, and the mark is
dropped from the rest. No control token holds the mark, hence none is found in, or begun by, a user's text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

_PRIVATE_USE: Final = range(0x10FFFD, 0xFFFFF, -1)


class UserText:
    """The marking for one template: `literals` are its own strings, `control` the texts of the control tokens."""

    def __init__(self, control: Collection[str], literals: Iterable[str]) -> None:
        self._first = {token[0] for token in control}
        literals = set(literals)
        # A template that compares a field with '</think>' still must find it.
        kept = [literal for literal in literals if self._first & set(literal) and not _touches(literal, control)]
        parts = [*sorted(kept, key=len, reverse=True), *self._first]
        self._pattern = re.compile("|".join(map(re.escape, parts))) if self._first else None
        self._endings = {
            token[len(begun) :]
            for literal in literals
            for begun in _begun(literal, control)
            for token in control
            if token.startswith(begun)
        }

    def mark(self, text: str, mark: str) -> str:
        """`text` with the mark in it wherever it could begin a control token, or end one that the template begins."""
        stripped = text.lstrip()
        if stripped and any(stripped.startswith(ending) or ending.startswith(stripped) for ending in self._endings):
            blank = len(text) - len(stripped)
            return text[:blank] + mark + self._mark_beginnings(stripped, mark)
        return self._mark_beginnings(text, mark)

    def _mark_beginnings(self, text: str, mark: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: match.group() + (mark if match.group() in self._first else ""), text)


def unused_mark(texts: Iterable[str]) -> str:
    """A private-use character that is in none of `texts`."""
    used = set().union(*texts)
    return next(character for code in _PRIVATE_USE if (character := chr(code)) not in used)


def _touches(literal: str, control: Collection[str]) -> bool:
    """Whether a control token stands in `literal`, or begins at its end and could go on behind it."""
    return any(token in literal for token in control) or bool(_begun(literal, control))


def _begun(literal: str, control: Collection[str]) -> set[str]:
    """The ends of `literal` that are the start, and not the whole, of a control token."""
    return {token[:size] for token in control for size in range(1, len(token)) if literal.endswith(token[:size])}
