"""Several answers of one request: each merges by its own index and ends by itself; the last end is the request's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.errors import EngineError, WorkerLost
from paceline.services.router.answer import Answer, Piece
from paceline.services.router.best_of import BestOf
from paceline.services.router.choices import Choices, Heard
from paceline.services.router.outbox import joined
from paceline.services.router.prompt import Best
from paceline.services.router.words import ChoiceFinished, NewTokens
from paceline.types import FinishReason, TokenLogprob


class Letters:
    """Token 97 is `a`."""

    def push(self, ids: Sequence[int], /) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


def choices(count: int, *, stop: tuple[str, ...] = (), min_tokens: int = 0, scored_prompt: bool = False) -> Choices:
    return Choices(
        lambda: Answer(Letters(), stop=stop, silent_ids=(), min_tokens=min_tokens),
        count=count,
        scored_prompt=scored_prompt,
    )


def says(choice: int, index: int, text: str, **more: tuple[TokenLogprob, ...]) -> NewTokens:
    return NewTokens(index=index, ids=tuple(map(ord, text)), choice=choice, **more)


def ends(choice: int, tokens: int, reason: FinishReason = FinishReason.LENGTH) -> ChoiceFinished:
    return ChoiceFinished(choice=choice, reason=reason, completion_tokens=tokens)


def test_pieces_belong_to_their_choice_and_the_last_end_is_left_to_the_request() -> None:
    both = choices(2)
    [first], _ = both.take(says(1, 0, "x"))
    assert (first.choice, first.text, first.index) == (1, "x", 0)
    [again], _ = both.take(says(1, 0, "xy"))
    assert (again.text, again.index) == ("y", 1)
    [end], heard = both.take(ends(1, 2))
    assert (end.choice, heard) == (1, Heard.GOES_ON)
    assert end.end is not None
    assert (end.end.reason, end.end.tokens) == (FinishReason.LENGTH, 2)
    both.take(says(0, 0, "a"))
    assert both.take(ends(0, 1, FinishReason.STOP)) == ([], Heard.OVER)
    assert (both.end(completion_tokens=3).choice, both.last_reason, both.num_tokens) == (0, FinishReason.STOP, 3)


def test_a_stop_string_ends_its_choice_alone_until_it_is_the_last() -> None:
    both = choices(2, stop=("b",))
    pieces, heard = both.take(says(0, 0, "ab"))
    assert heard is Heard.STOPPED
    assert "".join(piece.text for piece in pieces) == "a"
    assert pieces[-1].end is not None
    assert (pieces[-1].end.reason, pieces[-1].end.stop_text) == (FinishReason.STOP, "b")
    assert both.take(says(0, 2, "c")) == ([], Heard.GOES_ON)
    assert both.take(ends(0, 5, FinishReason.CANCELLED)) == ([], Heard.GOES_ON)
    assert both.take(says(1, 0, "xb"))[1] is Heard.OVER
    assert (both.end().choice, both.stop_text) == (1, "b")


def test_text_of_the_first_min_tokens_is_not_searched_for_stop_strings() -> None:
    one = choices(1, stop=("ab",), min_tokens=3)
    [piece], heard = one.take(says(0, 0, "aba"))
    assert (piece.text, heard) == ("aba", Heard.GOES_ON)
    pieces, heard = one.take(says(0, 3, "xab"))
    assert ("".join(piece.text for piece in pieces), heard) == ("x", Heard.OVER)


def test_no_piece_leaves_before_the_prompts_log_probabilities_and_the_first_carries_them() -> None:
    score = (TokenLogprob(5, -1.5, ((5, -1.5),)),)
    one = choices(1, scored_prompt=True)
    assert one.take(says(0, 0, "ab")) == ([], Heard.GOES_ON)
    pieces, _ = one.take(says(0, 0, "a", prompt_logprobs=score))
    assert [(piece.text, piece.prompt_logprobs) for piece in pieces] == [("ab", score)]
    [later], _ = one.take(says(0, 2, "c"))
    assert later.prompt_logprobs == ()
    with pytest.raises(WorkerLost, match="log-probabilities"):
        choices(1, scored_prompt=True).end()


def test_log_probabilities_stay_with_their_tokens_whoever_says_them_first() -> None:
    scores = tuple(TokenLogprob(ord(letter), -float(index)) for index, letter in enumerate("abc"))
    one = choices(1)
    assert one.take(says(0, 1, "bc", logprobs=scores[1:])) == ([], Heard.GOES_ON)
    [piece], _ = one.take(says(0, 0, "a", logprobs=scores[:1]))
    assert (piece.token_ids, piece.logprobs) == ((97, 98, 99), scores)
    assert one.take(says(0, 0, "ab", logprobs=scores[:2])) == ([], Heard.GOES_ON)


def test_a_choice_nobody_asked_for_and_one_that_never_ends_are_faults() -> None:
    with pytest.raises(EngineError, match="choice 2, and 2 were asked for"):
        choices(2).take(says(2, 0, "a"))
    both = choices(2)
    both.take(ends(0, 0))
    with pytest.raises(EngineError, match="1 of 2 choices"):
        both.end()


def test_waiting_pieces_are_joined_by_choice() -> None:
    both = choices(2)
    pieces = [piece for index in range(3) for choice in (0, 1) for piece in both.take(says(choice, index, "x"))[0]]
    pieces += both.take(ends(0, 3))[0]
    first, second = joined(pieces)
    assert (first.choice, first.text, first.index) == (0, "xxx", 0)
    assert first.end is not None
    assert (second.choice, second.text, second.end) == (1, "xxx", None)


def test_the_best_choices_leave_best_first_when_all_have_ended() -> None:
    def scored(choice: int, text: str, *logprobs: float) -> NewTokens:
        scores = tuple(TokenLogprob(ord(letter), value) for letter, value in zip(text, logprobs, strict=True))
        return says(choice, 0, text, logprobs=scores)

    def over(best: BestOf) -> list[Piece]:
        assert best.take(scored(0, "aaa", -1.0, -1.0, -1.0)) == ([], Heard.GOES_ON)
        assert best.take(scored(1, "b", -2.0)) == ([], Heard.GOES_ON)
        assert best.take(scored(2, "cc", -0.5, -0.25)) == ([], Heard.GOES_ON)
        for choice, tokens in ((2, 2), (0, 3)):
            assert best.take(ends(choice, tokens)) == ([], Heard.GOES_ON)
        pieces, heard = best.take(ends(1, 1, FinishReason.STOP))
        assert heard is Heard.OVER
        return pieces

    two = BestOf(choices(3), Best(keep=2, show_logprobs=False))
    pieces = over(two)
    assert [(piece.choice, piece.text, piece.logprobs) for piece in pieces] == [(0, "cc", ()), (1, "aaa", ())]
    assert pieces[0].end is not None and pieces[1].end is None
    assert (two.end(completion_tokens=6).choice, two.num_tokens, two.last_reason) == (1, 6, FinishReason.LENGTH)
    one = BestOf(choices(3), Best(keep=1, show_logprobs=True))
    [piece] = over(one)
    assert (piece.text, len(piece.logprobs), piece.end) == ("cc", 2, None)
