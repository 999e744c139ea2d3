"""The two kinds of tokenizer that GGUF metadata describes, as backends of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.errors import CheckpointError
from paceline.text.pieces import SPACE

NORMAL_TOKEN: Final = 1
"""The number in `tokenizer.ggml.token_type` of a token that merging makes."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# By `tokenizer.ggml.pre`; each as the model's own tokenizer.json has it.
PRE_TOKENIZERS: Final = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    # Each digit alone, then GPT-2's pattern.
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": _split(_WORDS % "{1,3}"),
    "qwen2": _split(_WORDS % ""),
}
STARTS_WITH_BOS: Final = ("llama-bpe",)
"""The pre-tokenizers whose models start a prompt with BOS unless the file says otherwise."""


def byte_level_backend(origin: str, tokens: Sequence[str], merges: Sequence[str], *, pre: str) -> Tokenizer:
    """Byte-level BPE; `pre` is a key of `PRE_TOKENIZERS`. Raises `CheckpointError`."""
    pairs = [(left, right) for merge in merges for left, _, right in [merge.partition(" ")]]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    try:
        # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{origin}: the tokenizer's merges do not fit its tokens: {error}") from error
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_backend(
    origin: str,
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    unknown: str | None,
    add_space_prefix: bool,
) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours that make a token, those of the highest score merge first.

    What no token has is spelled in bytes. Raises `CheckpointError`.
    """
    vocabulary = {text: index for index, text in enumerate(tokens)}
    score_of = {
        text: score for text, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL_TOKEN and text
    }
    ranked = sorted((text for text in score_of if len(text) > 1), key=score_of.__getitem__, reverse=True)
    merges = [
        (text[:at], text[at:])
        for text in ranked
        for at in range(1, len(text))
        if text[:at] in score_of and text[at:] in score_of
    ]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{origin}: the tokenizer's tokens make no vocabulary: {error}") from error
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if add_space_prefix else spaces
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
