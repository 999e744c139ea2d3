"""The tokenizer out of a GGUF file's metadata."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.checkpoint.fields import Fields
from paceline.checkpoint.gguf_config import CONTROL_TOKEN
from paceline.checkpoint.gguf_header import GgufHeader
from paceline.errors import CheckpointError, quote
from paceline.text.vocab import Vocab

_USER_DEFINED_TOKEN: Final = 4
_MODEL: Final = "gpt2"  # llama.cpp's name for byte-level BPE
_PRE_TOKENIZERS: Final = ("smollm",)
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_vocab(header: GgufHeader) -> Vocab:
    """The tokenizer, or `CheckpointError` for a kind that is not served or metadata that contradicts itself."""
    fields = Fields(header.metadata, str(header.path))
    _check_kind(fields)
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    kinds = _integers(fields, "tokenizer.ggml.token_type", default=[1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{header.path}: {len(tokens)} tokens and {len(kinds)} token types")
    backend = _backend(fields, tokens, _strings(fields, "tokenizer.ggml.merges"))
    control = {
        text: index for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN
    }
    user_defined = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED_TOKEN]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])
    backend.encode_special_tokens = True
    named = _named_tokens(fields, tokens)
    return Vocab(
        backend=backend,
        control=control,
        bos_ids=_bos_ids(fields, len(tokens)),
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        named_tokens=named,
    )


def _check_kind(fields: Fields) -> None:
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    instead = "give a Hugging Face folder with a tokenizer.json instead"
    if kind != _MODEL:
        raise CheckpointError(
            f"{fields.origin}: tokenizer.ggml.model is {quote(kind)}, supported is {_MODEL}; {instead}"
        )
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{fields.origin}: tokenizer.ggml.pre is {quote(pre)}, "
            f"supported are {', '.join(_PRE_TOKENIZERS)}; {instead}"
        )


def _backend(fields: Fields, tokens: list[str], merges: list[str]) -> Tokenizer:
    pairs = [(left, right) for merge in merges for left, _, right in [merge.partition(" ")]]
    try:
        backend = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=pairs))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{fields.origin}: the tokenizer's merges do not fit its tokens: {error}") from error
    # As SmolLM's own tokenizer.json has it, and llama.cpp for `smollm`: each digit alone, then GPT-2's pattern.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _bos_ids(fields: Fields, num_tokens: int) -> tuple[int, ...]:
    bos = fields.optional_integer("tokenizer.ggml.bos_token_id")
    if bos is None or not fields.flag("tokenizer.ggml.add_bos_token", False):
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
