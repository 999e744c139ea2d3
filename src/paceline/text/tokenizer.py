"""Text to token ids and back, for a model's byte-level or SentencePiece BPE.

Control tokens such as `<|im_end|>` are found here and not by the tokenizer library: a text is split at them only where
the caller allows it, and everything else is encoded as if they did not exist. So what a user types never becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from paceline.checkpoint import ModelConfig, Source, SourceKind, read_config
from paceline.checkpoint.gguf_header import read_header
from paceline.errors import CheckpointError, InvalidRequest, quote
from paceline.text import gguf_vocab, hf_vocab
from paceline.text.vocab import Vocab


class Tokenizer:
    """Encodes and decodes; safe to use from several threads. A dummy model's has no text, only ids."""

    def __init__(self, vocab: Vocab | None, config: ModelConfig) -> None:
        """Of `vocab`, or without text where that is None. Raises `CheckpointError` where the two do not fit."""
        self._vocab = vocab
        self._config = config
        self._bytes: dict[int, bytes] = {}
        self._control_ids = frozenset(vocab.control.values()) if vocab else frozenset[int]()
        self._added = {} if vocab is None else vocab.backend.get_added_tokens_decoder()
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        if vocab is not None:
            self._check(vocab)

    @classmethod
    def load(cls, source: Source) -> Tokenizer:
        """The tokenizer of `source`. Raises `CheckpointError`."""
        config = read_config(source)
        if source.kind is SourceKind.DUMMY:
            return cls(None, config)
        assert source.path is not None, "only a dummy may have no path"
        if source.kind is SourceKind.FOLDER:
            return cls(hf_vocab.read_vocab(source.path), config)
        return cls(gguf_vocab.read_vocab(read_header(source.path)), config)

    @property
    def has_text(self) -> bool:
        """False for a dummy: prompts are token ids, and its tokens decode to nothing."""
        return self._vocab is not None

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size), as the model has them; some may have no text."""
        return self._config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn."""
        return self._config.eos_token_ids

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The text and id of each token that is never text."""
        return self._vocab.control if self._vocab else {}

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token and so on, as far as the model has them."""
        return self._vocab.named_tokens if self._vocab else {}

    @property
    def chat_template(self) -> str | None:
        """The model's own template in Jinja, None where it has none."""
        return self._vocab.chat_template if self._vocab else None

    def encode(
        self, text: str, *, allow_special: bool = False, add_bos: bool = True, ignore: str | None = None
    ) -> list[int]:
        """The ids of `text`; empty for an empty text unless the model starts each prompt with a token.

        With `allow_special`, the texts of control tokens in it become those tokens. `ignore` is a character that is
        dropped after control tokens were found, so that it can keep a text from being one. Raises `InvalidRequest` for
        lone surrogates, and for a model without a tokenizer.
        """
        if self._vocab is None:
            raise InvalidRequest("prompt", f"{self._config.name} has no tokenizer: give token ids instead of text")
        ids = list(self._vocab.bos_ids) if add_bos else []
        start = 0
        if allow_special and self._control_pattern is not None:
            for match in self._control_pattern.finditer(text):
                ids += self._encode_plain(self._vocab, text[start : match.start()], ignore, inner=start > 0)
                ids.append(self._vocab.control[match.group()])
                start = match.end()
        return ids + self._encode_plain(self._vocab, text[start:], ignore, inner=start > 0)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, bytes that are no UTF-8 as U+FFFD. Ids without a token count as empty."""
        return b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in ids).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that a token stands for: maybe a part of a character, and none for a control token."""
        if skip_special and token_id in self._control_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._lookup(token_id)
        return found

    def _lookup(self, token_id: int) -> bytes:
        if self._vocab is None or not 0 <= token_id < self.vocab_size:
            return b""
        added = self._added.get(token_id)
        if added is not None:  # in no alphabet but the reader's
            return str(added.content).encode()
        return self._vocab.piece_bytes(self._vocab.backend.id_to_token(token_id) or "")

    @staticmethod
    def _encode_plain(vocab: Vocab, text: str, ignore: str | None, *, inner: bool) -> list[int]:
        plain = text.replace(ignore, "") if ignore else text
        if not plain:
            return []
        backend = vocab.inner if inner and vocab.inner is not None else vocab.backend
        try:
            # A batch of one lets go of the interpreter's lock; `encode` holds it, for seconds with megabytes of text.
            [encoded] = backend.encode_batch_fast([plain], add_special_tokens=False)
        except TypeError as error:  # what the library says of text that has no UTF-8
            raise InvalidRequest("prompt", "has a lone surrogate, which is not valid Unicode") from error
        ids: list[int] = encoded.ids
        return ids

    def _check(self, vocab: Vocab) -> None:
        """Raises `CheckpointError` for a vocabulary larger than the model's, or control tokens that absorb text.

        Texts between control tokens are encoded one by one; some tokenizers would not give the same for the whole.
        """
        largest = vocab.backend.get_vocab_size(with_added_tokens=True)
        if largest > self.vocab_size:
            raise CheckpointError(
                f"{self._config.name}: the tokenizer has {largest} tokens, and the model's embedding {self.vocab_size}"
            )
        probe = "".join(f"a {text} b{text}c" for text in vocab.control)
        vocab.backend.encode_special_tokens = False
        whole = vocab.backend.encode(probe, add_special_tokens=False).ids
        vocab.backend.encode_special_tokens = True
        if whole != self.encode(probe, allow_special=True, add_bos=False):
            raise CheckpointError(
                f"{self._config.name}: control tokens that take the text beside them are not supported, "
                f"and some of {quote(list(vocab.control))} do"
            )
