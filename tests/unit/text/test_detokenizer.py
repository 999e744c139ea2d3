from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Source
from paceline.checkpoint.gguf_header import read_header
from paceline.testing.texts import varied_texts
from paceline.text import Detokenizer, Tokenizer
from paceline.text.gguf_vocab import read_vocab


@pytest.fixture(scope="session")
def smollm2(default_model: Source) -> Tokenizer:
    return Tokenizer.load(default_model)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


class ByteTokens:
    """A tokenizer whose ids are bytes: every cut of every character occurs."""

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return bytes([token_id])


@given(st.one_of(st.text().map(str.encode), st.binary(max_size=200)), st.data())
def test_the_pieces_of_any_bytes_join_to_the_whole_decode(content: bytes, data: st.DataObject) -> None:
    detokenizer = Detokenizer(ByteTokens())
    pieces, start = [], 0
    while start < len(content):
        end = data.draw(st.integers(start + 1, len(content)))
        pieces.append(detokenizer.push(content[start:end]))
        start = end
    pieces.append(detokenizer.flush())
    whole = content.decode(errors="replace")
    assert "".join(pieces) == whole
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")


@given(st.text(min_size=1))
def test_a_character_leaves_with_its_last_byte_and_not_later(text: str) -> None:
    detokenizer = Detokenizer(ByteTokens())
    for character in text:
        *head, last = character.encode()
        assert detokenizer.push(head) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.flush() == ""


@pytest.mark.model
def test_f01_five_thousand_texts_streamed_token_by_token_are_their_decode(smollm2: Tokenizer) -> None:
    for text in varied_texts(5_000, seed=1):
        ids = smollm2.encode(text)
        pieces = stream(smollm2, ids)
        whole = smollm2.decode(ids)
        assert "".join(pieces) == whole
        assert "\ufffd" in whole or all("\ufffd" not in piece for piece in pieces)


@pytest.mark.model
@pytest.mark.parametrize("skip_special", [True, False])
def test_f01_random_ids_streamed_one_by_one_are_what_the_library_decodes(
    smollm2: Tokenizer, default_model: Source, skip_special: bool
) -> None:
    assert default_model.path is not None
    library = read_vocab(read_header(default_model.path)).backend
    source = random.Random(0)
    for _ in range(1_000):
        ids = source.choices(range(smollm2.vocab_size), k=source.randint(0, 60))
        whole = library.decode(ids, skip_special_tokens=skip_special)
        assert smollm2.decode(ids, skip_special=skip_special) == whole
        assert "".join(stream(smollm2, ids, skip_special=skip_special)) == whole
