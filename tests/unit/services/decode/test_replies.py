"""What a decode front makes of tokens that wait to be written."""

from __future__ import annotations

from paceline.errors import Draining
from paceline.services.decode.messages import ChoiceOver, NewTokens, Over
from paceline.services.decode.replies import joined
from paceline.types import FinishReason, ReservationId, TokenLogprob

R = ReservationId("r")


def tokens(index: int, *ids: int, choice: int = 0) -> NewTokens:
    logprobs = tuple(TokenLogprob(each, -0.5) for each in ids)
    return NewTokens(reservation_id=R, ids=list(ids), index=index, choice=choice, logprobs=logprobs)


def test_tokens_that_follow_each_other_become_one_message_with_their_logprobs() -> None:
    assert list(joined([tokens(0, 5), tokens(1, 6, 7), tokens(3, 8)])) == [tokens(0, 5, 6, 7, 8)]


def test_tokens_of_another_choice_or_behind_a_gap_stay_apart() -> None:
    apart = [tokens(0, 5), tokens(0, 6, choice=1), tokens(2, 7, choice=1)]
    assert list(joined(apart)) == apart


def test_the_order_of_tokens_ends_and_errors_is_kept() -> None:
    ended = ChoiceOver(reservation_id=R, choice=0, finish=FinishReason.STOP, completion_tokens=2)
    over = Over(reservation_id=R, finish=FinishReason.STOP)
    error = Draining("the worker stops")
    events = [tokens(0, 5), tokens(1, 6), ended, tokens(0, 7, choice=1), over, error]
    assert list(joined(events)) == [tokens(0, 5, 6), ended, tokens(0, 7, choice=1), over, error]


def test_log_probabilities_of_the_prompt_begin_a_message_of_their_own() -> None:
    scored = NewTokens(reservation_id=R, ids=[6], index=1, prompt_logprobs=(TokenLogprob(1, -1.0),))
    plain = NewTokens(reservation_id=R, ids=[5], index=0)
    assert list(joined([plain, scored])) == [plain, scored]
