"""The tokenizer out of a Hugging Face folder: tokenizer.json, tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, pre_tokenizers

from paceline.checkpoint.hf_config import read_json
from paceline.errors import CheckpointError, quote
from paceline.text.pieces import SPACE, byte_level_bytes, sentencepiece_bytes
from paceline.text.vocab import Vocab

_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_vocab(folder: Path) -> Vocab:
    """The tokenizer, or `CheckpointError` for one that is missing, damaged or not byte-level."""
    file = folder / _TOKENIZER
    if not file.is_file():
        raise CheckpointError(f"{folder}: {_TOKENIZER} is missing; it is the only kind of tokenizer file that is read")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{file}: this is no tokenizer: {error}") from error
    is_sentencepiece = _is_sentencepiece(read_json(file).get("decoder"))
    if not is_sentencepiece and not isinstance(backend.decoder, decoders.ByteLevel):
        raise CheckpointError(
            f"{file}: the decoder is {quote(backend.decoder)}, and only byte-level BPE (ByteLevel) "
            "and SentencePiece's with a fall-back to bytes are supported"
        )
    control = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    bos_ids = tuple(backend.encode("", add_special_tokens=True).ids)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
    return Vocab(
        backend=backend,
        control=control,
        bos_ids=bos_ids,
        chat_template=_chat_template(folder, settings),
        named_tokens={name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None},
        piece_bytes=sentencepiece_bytes if is_sentencepiece else byte_level_bytes,
        inner=_without_prefix(backend),
    )


def _without_prefix(backend: Tokenizer) -> Tokenizer | None:
    """The tokenizer for text behind a control token, where only the start of a text gets a space before it."""
    spaces = backend.pre_tokenizer
    if not isinstance(spaces, pre_tokenizers.Metaspace) or spaces.prepend_scheme != "first":
        return None
    inner = Tokenizer.from_str(backend.to_str())
    inner.encode_special_tokens = True
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=spaces.replacement, prepend_scheme="never", split=spaces.split
    )
    return inner


def _is_sentencepiece(decoder: object) -> bool:
    """Whether pieces are SentencePiece's: its sign for a space, and bytes for what no piece has.

    What a decoder may strip at the start of a text is kept here: a piece's bytes do not hang on its place.
    """
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return False
    kinds = [step.get("type") for step in steps]
    replaced = {(str(step.get("pattern")), step.get("content")) for step in steps if step.get("type") == "Replace"}
    return (
        "ByteFallback" in kinds
        and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and replaced == {(str({"String": SPACE}), " ")}
    )


def _token_text(value: object) -> str | None:
    """A named token is a string, or an object whose `content` is one."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, settings: dict[str, object]) -> str | None:
    """The template in a file of its own, or in the settings: one string, or a list of named ones."""
    file = folder / _TEMPLATE
    try:
        if file.is_file():
            return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return str(entry["template"])
    raise CheckpointError(f"{folder / _SETTINGS}: chat_template is neither a string nor a list with one named default")
