from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Source
from paceline.errors import InvalidRequest
from paceline.text import Detokenizer, StopMatcher, StopStep, Tokenizer


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What was let out piece by piece, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    shown, stop = [], None
    for piece in pieces:
        step = matcher.push(piece)
        shown.append(step.text)
        stop = stop or step.stop
    return [*shown, matcher.flush()], stop


def test_f03_nothing_of_a_stop_string_that_straddles_pieces_is_let_out() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "KLM"]) == (["ABC", "", "", "", "", "", ""], "DEFGHIJ")


def test_f03_a_near_miss_is_let_out_in_full() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "X"]) == (["ABC", "", "", "", "DEFGHIX", ""], None)
    assert run(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], None)


def test_text_before_a_stop_string_in_the_same_piece_is_let_out() -> None:
    assert StopMatcher(["\n\n"]).push("one\n\ntwo") == StopStep("one", "\n\n")


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(character).text for character in "aaaxa"] == ["", "", "a", "aax", ""]
    assert matcher.flush() == "a"


def test_of_two_stop_strings_that_end_together_the_longer_wins() -> None:
    assert run(["lo", "hello"], ["hel", "lo"]) == (["", "", ""], "hello")


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    assert "".join(run(["abcd", "bc"], ["abcd"])[0]) == "".join(run(["abcd", "bc"], list("abcd"))[0]) == "a"


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize(
    ("stops", "named"),
    [
        ([""], "stop: the string at index 0 is empty"),
        (["x"] * 17, "stop: 17 strings are over the limit of 16"),
        (["a", "x" * 1_025], "has 1025 characters, the limit is 1024"),
    ],
)
def test_stop_strings_out_of_bounds_are_invalid(stops: list[str], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        StopMatcher(stops)


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """By trying every end in turn."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_any_cut_gives_what_trying_every_end_gives_and_shows_nothing_too_early(
    stops: list[str], pieces: list[str]
) -> None:
    shown, stop = run(stops, pieces)
    expected, expected_stop = reference(stops, "".join(pieces))
    assert ("".join(shown), stop) == (expected, expected_stop)
    # What is held back at each moment could indeed begin a stop string.
    if stop is None:
        sent, seen = "", ""
        for piece, text in zip(pieces, shown, strict=False):
            sent, seen = sent + text, seen + piece
            held = seen[len(sent) :]
            assert not held or any(other.startswith(held) for other in stops)


@pytest.mark.model
def test_f03_over_the_default_models_tokens(default_model: Source) -> None:
    tokenizer = Tokenizer.load(default_model)
    for answer, expected, expected_stop in [
        ("ABCDEFGHIJKLMNOP", "ABC", "DEFGHIJ"),
        ("ABCDEFGHIXKLMNOP", "ABCDEFGHIXKLMNOP", None),
    ]:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(answer)]
        assert len(pieces) > 2
        shown, stop = run(["DEFGHIJ"], [*pieces, detokenizer.flush()])
        assert ("".join(shown), stop) == (expected, expected_stop)
        assert stop is None or all("D" not in piece for piece in shown)
