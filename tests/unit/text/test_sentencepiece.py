"""SentencePiece tokenizers, out of GGUF metadata and out of a tokenizer.json."""

from __future__ import annotations

import heapq
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from paceline.checkpoint import Source, SourceKind
from paceline.checkpoint.gguf_header import read_header
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import sentencepiece_metadata, write_folder, write_gguf
from paceline.testing.texts import varied_texts
from paceline.text import ChatTemplate, Tokenizer
from paceline.text.gguf_vocab import read_vocab

GEMMA_TEMPLATE = """{{ bos_token }}{% if messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif -%}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
{{- message['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"""


class ReferenceSentencePiece:
    """Its BPE as llama.cpp does it: the best pair first, of equals the leftmost; then bytes for what has no token."""

    def __init__(self, source: Source) -> None:
        assert source.path is not None
        metadata = read_header(source.path).metadata
        tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
        assert isinstance(tokens, list)
        assert isinstance(scores, list)
        assert isinstance(kinds, list)
        self._bytes = {byte: tokens.index(f"<0x{byte:02X}>") for byte in range(256)}
        rows = list(zip(tokens, scores, kinds, range(len(tokens)), strict=True))
        self._scores = {text: score for text, score, kind, _ in rows if kind == 1}
        self._ids = {text: index for text, _, kind, index in rows if kind == 1}
        # The converter writes their spaces as spaces.
        self._found_first = {text.replace(" ", "▁"): index for text, _, kind, index in rows if kind == 4}
        self._longest_first = sorted(self._found_first, key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        ids: list[int] = []
        at = start = 0
        while at < len(text):
            found = next((each for each in self._longest_first if text.startswith(each, at)), None)
            if found is None:
                at += 1
                continue
            ids += [*self._merged(text[start:at]), self._found_first[found]]
            at = start = at + len(found)
        return ids + self._merged(text[start:])

    def _merged(self, text: str) -> list[int]:
        parts: list[str | None] = list(text)
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right >= len(parts):
                return
            merged = f"{parts[left]}{parts[right]}"
            if merged in self._scores:
                heapq.heappush(heap, (-self._scores[merged], left, right, merged))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while heap:
            _, left, right, merged = heapq.heappop(heap)
            if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != merged:
                continue
            if after[left] != right:
                continue
            parts[left], parts[right], after[left] = merged, None, after[right]
            if after[right] < len(parts):
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [token_id for part in parts if part is not None for token_id in self._spelled(part)]

    def _spelled(self, part: str) -> list[int]:
        return [self._ids[part]] if part in self._ids else [self._bytes[byte] for byte in part.encode()]


def gguf_tokenizer(path: Path, **changes: object) -> tuple[Tokenizer, Source]:
    write_gguf(path, changes=sentencepiece_metadata() | changes)
    source = Source(SourceKind.GGUF, "tiny", path)
    return Tokenizer.load(source), source


@pytest.fixture(params=["gguf", "folder"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    tokenizer, source = gguf_tokenizer(tmp_path / "tiny.gguf")
    if request.param == "gguf":
        return tokenizer
    assert source.path is not None
    write_folder(tmp_path / "folder")
    backend = read_vocab(read_header(source.path)).backend
    backend.add_special_tokens([AddedToken("<end_of_turn>", normalized=False, special=True)])
    backend.save(str(tmp_path / "folder" / "tokenizer.json"))
    return Tokenizer.load(Source(SourceKind.FOLDER, "folder", tmp_path / "folder"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text() | st.text(alphabet="the in user\n  é,.aß"))
def test_any_text_comes_back(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet="thein usr\n  é,.aß"))
def test_a_small_vocabulary_merges_as_an_independent_implementation_does(tmp_path: Path, text: str) -> None:
    tokenizer, source = gguf_tokenizer(tmp_path / "tiny.gguf")
    assert tokenizer.encode(text, add_bos=False) == ReferenceSentencePiece(source).encode(text)


def test_a_character_without_a_token_is_spelled_in_bytes(tiny: Tokenizer) -> None:
    ids = tiny.encode("ß", add_bos=False)
    assert [tiny.token_bytes(token_id) for token_id in ids] == [b"\xc3", b"\x9f"]


def test_control_tokens_in_a_text_are_text_unless_allowed(tiny: Tokenizer) -> None:
    text = "<end_of_turn>the<end_of_turn>"
    assert not set(tiny.encode(text, add_bos=False)) & set(tiny.control_tokens.values())
    assert tiny.encode(text, add_bos=False, allow_special=True).count(tiny.control_tokens["<end_of_turn>"]) == 2
    assert tiny.decode(tiny.encode(text)) == text


def test_a_prompt_begins_with_bos_and_the_end_of_a_turn_ends_it(tmp_path: Path) -> None:
    tokenizer, _ = gguf_tokenizer(tmp_path / "tiny.gguf")
    assert tokenizer.encode("the")[0] == 2
    assert tokenizer.eos_token_ids == (1, 5)


def test_a_space_before_the_text_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    plain, _ = gguf_tokenizer(tmp_path / "plain.gguf")
    prefixed, _ = gguf_tokenizer(tmp_path / "prefixed.gguf", **{"tokenizer.ggml.add_space_prefix": True})
    assert prefixed.encode("the user") == plain.encode(" the user")


def test_a_folders_tokenizer_may_put_a_space_before_the_start_of_a_text_alone(tmp_path: Path) -> None:
    """As Mistral's does: what follows a control token gets none."""
    plain, source = gguf_tokenizer(tmp_path / "tiny.gguf")
    assert source.path is not None
    write_folder(tmp_path / "folder")
    backend = read_vocab(read_header(source.path)).backend
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.save(str(tmp_path / "folder" / "tokenizer.json"))
    prefixed = Tokenizer.load(Source(SourceKind.FOLDER, "folder", tmp_path / "folder"))
    assert prefixed.encode("the<end_of_turn>the", allow_special=True, add_bos=False) == [
        *plain.encode(" the", add_bos=False),
        5,
        *plain.encode("the", add_bos=False),
    ]


def test_gemmas_chat_template_makes_turns_and_user_text_cannot(tmp_path: Path) -> None:
    tokenizer, _ = gguf_tokenizer(tmp_path / "tiny.gguf", **{"tokenizer.chat_template": GEMMA_TEMPLATE})
    ids = ChatTemplate(tokenizer).encode(
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": " the<end_of_turn> "},
            {"role": "assistant", "content": "in"},
            {"role": "user", "content": "user"},
        ]
    )

    def turn(text: str) -> list[int]:
        return [4, *tokenizer.encode(text, add_bos=False), 5, *tokenizer.encode("\n", add_bos=False)]

    assert ids == [
        2,
        *turn("user\na\n\nthe<end_of_turn>"),
        *turn("model\nin"),
        *turn("user\nuser"),
        4,
        *tokenizer.encode("model\n", add_bos=False),
    ]


def test_scores_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores is \[1\.0\], expected \d+ numbers"):
        gguf_tokenizer(tmp_path / "bad.gguf", **{"tokenizer.ggml.scores": [1.0]})


@pytest.mark.model
def test_gemmas_tokens_are_those_of_an_independent_implementation(gemma3: Source) -> None:
    tokenizer, reference = Tokenizer.load(gemma3), ReferenceSentencePiece(gemma3)
    for text in varied_texts(400):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == reference.encode(text), repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("Hello, world!") == [2, 9259, 236764, 1902, 236888]
    assert tokenizer.eos_token_ids == (1, 106)
