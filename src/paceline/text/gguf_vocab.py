"""The tokenizer out of a GGUF file's metadata."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.gguf_config import CONTROL_TOKEN
from paceline.checkpoint.gguf_header import GgufHeader
from paceline.errors import CheckpointError, quote
from paceline.text import gguf_bpe
from paceline.text.pieces import byte_level_bytes, sentencepiece_bytes
from paceline.text.vocab import Vocab

_USER_DEFINED_TOKEN: Final = 4
# llama.cpp's names of the kinds of tokenizer.
_BYTE_LEVEL: Final = "gpt2"
_SENTENCEPIECE: Final = "llama"
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_vocab(header: GgufHeader) -> Vocab:
    """The tokenizer, or `CheckpointError` for a kind that is not served or metadata that contradicts itself."""
    fields = Fields(header.metadata, str(header.path))
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    kinds = _integers(fields, "tokenizer.ggml.token_type", default=[1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{header.path}: {len(tokens)} tokens and {len(kinds)} token types")
    named = _named_tokens(fields, tokens)
    is_sentencepiece = fields.text("tokenizer.ggml.model") == _SENTENCEPIECE
    backend = _sentencepiece(fields, tokens, kinds, named) if is_sentencepiece else _byte_level(fields, tokens)
    control = {
        text: index for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN
    }
    user_defined = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED_TOKEN]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])
    backend.encode_special_tokens = True
    return Vocab(
        backend=backend,
        control=control,
        bos_ids=_bos_ids(fields, len(tokens)),
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        named_tokens=named,
        piece_bytes=sentencepiece_bytes if is_sentencepiece else byte_level_bytes,
    )


def _byte_level(fields: Fields, tokens: list[str]) -> Tokenizer:
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    instead = "give a Hugging Face folder with a tokenizer.json instead"
    if kind != _BYTE_LEVEL:
        raise CheckpointError(
            f"{fields.origin}: tokenizer.ggml.model is {quote(kind)}, "
            f"supported are {_BYTE_LEVEL} and {_SENTENCEPIECE}; {instead}"
        )
    if pre not in gguf_bpe.PRE_TOKENIZERS:
        raise CheckpointError(
            f"{fields.origin}: tokenizer.ggml.pre is {quote(pre)}, "
            f"supported are {', '.join(gguf_bpe.PRE_TOKENIZERS)}; {instead}"
        )
    merges = _strings(fields, "tokenizer.ggml.merges")
    return gguf_bpe.byte_level_backend(fields.origin, tokens, merges, pre=pre)


def _sentencepiece(fields: Fields, tokens: list[str], kinds: list[int], named: dict[str, str]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], float):
        raise fields.wrong("tokenizer.ggml.scores", f"{len(tokens)} numbers")
    return gguf_bpe.sentencepiece_backend(
        fields.origin,
        tokens,
        scores,
        kinds,
        unknown=named.get("unk_token"),
        add_space_prefix=fields.flag("tokenizer.ggml.add_space_prefix", True),
    )


def _bos_ids(fields: Fields, num_tokens: int) -> tuple[int, ...]:
    bos = fields.optional_integer("tokenizer.ggml.bos_token_id")
    usual = (
        fields.text("tokenizer.ggml.model") == _SENTENCEPIECE
        or fields.text("tokenizer.ggml.pre", "") in gguf_bpe.STARTS_WITH_BOS
    )
    if bos is None or not fields.flag("tokenizer.ggml.add_bos_token", usual):
        return ()
    if not 0 <= bos < num_tokens:
        raise CheckpointError(f"{fields.origin}: bos_token_id {bos} is not in the vocabulary, [0, {num_tokens})")
    return (bos,)


def _named_tokens(fields: Fields, tokens: list[str]) -> dict[str, str]:
    named = {}
    for name, key in _NAMED.items():
        token_id = fields.optional_integer(f"tokenizer.ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    return named


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value
    raise fields.wrong(key, "a list of strings")


def _integers(fields: Fields, key: str, default: list[int]) -> list[int]:
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, list) and value and isinstance(value[0], int):
        return value
    raise fields.wrong(key, "a list of integers")
