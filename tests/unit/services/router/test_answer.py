"""The answer as it grows: merging by index, text and stop strings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import EngineError, WorkerLost
from paceline.services.router.answer import Answer
from paceline.testing.router_bench import byte_tokenizer, ids_of
from paceline.text import Detokenizer
from paceline.types import TokenLogprob

TOKENIZER = byte_tokenizer()
EOS = 2


def answer(*, stop: tuple[str, ...] = (), silent_ids: tuple[int, ...] = ()) -> Answer:
    return Answer(Detokenizer(TOKENIZER), stop=stop, silent_ids=silent_ids)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[str, list[tuple[int, list[int]]]]:
    """A text, and its tokens said in pieces that overlap, repeat and come in any order, all of them at least once."""
    text = draw(st.text(min_size=1, max_size=12))
    ids = ids_of(text)
    cuts = st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids)))
    ranges = [(min(cut), max(cut)) for cut in draw(st.lists(cuts, max_size=8))] + [(i, i + 1) for i in range(len(ids))]
    return text, [(start, ids[start:stop]) for start, stop in draw(st.permutations(ranges))]


@given(deliveries())
def test_whatever_the_order_each_token_is_told_once(case: tuple[str, list[tuple[int, list[int]]]]) -> None:
    text, said = case
    merged = answer()
    told: list[int] = []
    shown = ""
    for index, ids in said:
        piece = merged.add(index, ids)
        if piece is not None:
            assert piece.index == len(told) and piece.token_ids
            told += piece.token_ids
            shown += piece.text
    assert told == ids_of(text)
    assert shown + merged.end(completion_tokens=len(told)) == text


def test_what_is_said_again_is_nothing_new() -> None:
    merged = answer()
    assert merged.add(0, ids_of("ab")) is not None
    assert merged.add(0, ids_of("ab")) is None
    assert merged.add(1, ids_of("b")) is None


@pytest.mark.parametrize("early", [False, True])
def test_log_probabilities_behind_a_stop_string_are_not_the_answers(early: bool) -> None:
    merged = answer(stop=("b",))
    scores = [TokenLogprob(each, -1.0) for each in ids_of("abc")]
    if early:
        assert merged.add(1, ids_of("bc"), scores[1:]) is None
        piece = merged.add(0, ids_of("a"), scores[:1])
    else:
        piece = merged.add(0, ids_of("abc"), scores)
    assert piece is not None
    assert (piece.text, list(piece.token_ids), list(piece.logprobs)) == ("a", ids_of("ab"), scores[:2])
    assert merged.cumulative_logprob == -2.0


def test_an_early_token_waits_for_those_before_it() -> None:
    merged = answer()
    assert merged.add(1, ids_of("b")) is None
    piece = merged.add(0, ids_of("a"))
    assert piece is not None and (piece.index, piece.text) == (0, "ab")


@pytest.mark.parametrize("index", [0, 3])
def test_a_contradiction_is_an_error_even_of_a_token_that_waits(index: int) -> None:
    merged = answer()
    merged.add(0, ids_of("ab"))
    merged.add(3, ids_of("d"))
    with pytest.raises(WorkerLost, match=f"index {index}"):
        merged.add(index, ids_of("x"))


def test_an_end_with_a_gap_before_it_is_an_error() -> None:
    merged = answer()
    merged.add(0, ids_of("a"))
    merged.add(2, ids_of("c"))
    with pytest.raises(EngineError, match="token 1 of it never came"):
        merged.end()
    short = answer()
    short.add(0, ids_of("a"))
    with pytest.raises(EngineError, match="token 1 of it never came"):
        short.end(completion_tokens=2)


@given(cuts=st.lists(st.integers(0, 9), max_size=4))
def test_a_stop_string_cuts_the_same_wherever_the_tokens_are_cut(cuts: list[int]) -> None:
    ids, stopping = ids_of("abSTOPdefg"), answer(stop=("STOP", "zz"))
    shown, told = "", 0
    edges = sorted({0, *cuts, len(ids)})
    for start, end in pairwise(edges):
        piece = stopping.add(start, ids[start:end])
        if piece is not None:
            shown += piece.text
            told += len(piece.token_ids)
    assert (shown + stopping.end(), told) == ("ab", 6)
    assert (stopping.stop_text, stopping.num_tokens) == ("STOP", 6)


def test_what_was_held_back_in_vain_comes_at_the_end() -> None:
    stopping = answer(stop=("STOP",))
    piece = stopping.add(0, ids_of("abST"))
    assert piece is not None and piece.text == "ab"
    assert stopping.end() == "ST"
    assert stopping.stop_text is None


def test_a_character_is_shown_when_it_is_whole() -> None:
    merged = answer()
    first, second = ids_of("é")
    piece = merged.add(0, [first])
    assert piece is not None and piece.text == ""
    piece = merged.add(1, [second])
    assert piece is not None and piece.text == "é"
    merged.add(2, [first])
    assert merged.end() == "\ufffd"


def test_stop_ids_and_control_tokens_are_told_and_not_shown() -> None:
    [silent] = ids_of("!")
    merged = answer(silent_ids=(silent,))
    piece = merged.add(0, [*ids_of("a"), EOS, silent])
    assert piece is not None and piece.text == "a" and len(piece.token_ids) == 3
    assert merged.num_tokens == 3
