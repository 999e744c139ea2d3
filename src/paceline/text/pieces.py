"""What the pieces of a vocabulary stand for: the two alphabets there are, byte-level BPE's and SentencePiece's."""

from __future__ import annotations

import re
from typing import Final

SPACE: Final = "\u2581"
"""SentencePiece's stand-in for a space."""

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte: itself where it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level BPE's piece; one outside its alphabet is text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: `<0x0A>` is a byte, anything else text with its own sign for a space."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match.group(1), 16)])
    return piece.replace(SPACE, " ").encode()
