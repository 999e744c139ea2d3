"""What a model file says of its text: the tokenizer, its control tokens, and the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tokenizers

from paceline.text.pieces import byte_level_bytes


@dataclass(frozen=True, slots=True)
class Vocab:
    """The parts of a `Tokenizer`, as read from a GGUF file or a Hugging Face folder."""

    backend: tokenizers.Tokenizer  # encodes the text of control tokens as text
    control: dict[str, int]  # each control token's text and id
    bos_ids: tuple[int, ...] = ()  # what a plain prompt starts with, if anything
    chat_template: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: what templates may print
    piece_bytes: Callable[[str], bytes] = byte_level_bytes  # what a token that is not an added one stands for
    inner: tokenizers.Tokenizer | None = None  # for text behind a control token, where that is encoded otherwise
