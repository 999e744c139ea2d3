"""What is said of requests over a token stream, and what becomes of it where that ends."""

from __future__ import annotations

import pytest

from paceline.errors import Draining, NumericalError
from paceline.services.decode import streams
from paceline.services.decode.messages import ChoiceOver, NewTokens, Over, Redirected, Reserved
from paceline.services.decode.replies import joined, messages, reply
from paceline.services.decode.streams import RequestStream, TokenStream
from paceline.services.worker.messages import Failure
from paceline.types import FinishReason, ReservationId, TokenLogprob, WorkerLoad
from paceline.wire import MESSAGE_BYTES

A, B = ReservationId("a"), ReservationId("b")


def tokens(index: int, *ids: int, of: ReservationId = A, choice: int = 0, scored: bool = False) -> NewTokens:
    logprobs = tuple(TokenLogprob(each, -0.5, ((each, -0.5), (each + 1, -1.0))) for each in ids) if scored else ()
    return NewTokens(reservation_id=of, ids=list(ids), index=index, choice=choice, logprobs=logprobs)


def over(of: ReservationId = A, failure: Failure | None = None) -> Over:
    return Over(reservation_id=of, finish=FinishReason.LENGTH, failure=failure)


async def test_what_is_said_of_all_requests_comes_together_in_order() -> None:
    shared = TokenStream()
    for each in (Reserved(reservation_id=A), tokens(0, 5), tokens(0, 7, of=B), tokens(1, 6)):
        shared.put(each)
    assert await shared.take() == [Reserved(reservation_id=A), tokens(0, 5), tokens(0, 7, of=B), tokens(1, 6)]


async def test_a_request_whose_token_stream_ends_begins_again_and_goes_on_by_its_own() -> None:
    shared = TokenStream()
    request = RequestStream(A, shared)
    redirected = Redirected(reservation_id=A, call_id=None, attempt=2, cause="silence")
    ended = ChoiceOver(reservation_id=A, choice=0, finish=FinishReason.STOP, completion_tokens=3)
    said = (Reserved(reservation_id=A), redirected, tokens(0, 5), tokens(0, 8, choice=1), tokens(1, 6, 7), ended)
    for event in said:
        request.put(event)
    shared.end()
    request.put(tokens(1, 9, choice=1))
    again = [Reserved(reservation_id=A), redirected, tokens(0, 5, 6, 7), tokens(0, 8, choice=1), ended]
    assert await request.take() == [*again, tokens(1, 9, choice=1)]
    assert await shared.take() == list(said)
    assert shared.ended


async def test_log_probabilities_are_said_again_too() -> None:
    shared = TokenStream()
    request = RequestStream(A, shared)
    prompt = (TokenLogprob(1, -2.0),)
    first = NewTokens(reservation_id=A, ids=[5], index=0, logprobs=(TokenLogprob(5, -1.0),), prompt_logprobs=prompt)
    second = NewTokens(reservation_id=A, ids=[6], index=1, logprobs=(TokenLogprob(6, -3.0),))
    request.put(first)
    request.put(second)
    shared.end()
    [again] = await request.take()
    assert isinstance(again, NewTokens)
    assert again.logprobs == (*first.logprobs, *second.logprobs)
    assert again.prompt_logprobs == prompt


async def test_a_long_answer_with_log_probabilities_is_said_again_in_messages_that_are_not_too_long() -> None:
    shared = TokenStream()
    request = RequestStream(A, shared)
    top = tuple((token, -1.0 - token) for token in range(20))
    said = tuple(TokenLogprob(token, -0.5, top) for token in range(5_000))
    for index in range(0, 5_000, 100):
        some = said[index : index + 100]
        ids = [each.token_id for each in some]
        request.put(NewTokens(reservation_id=A, ids=ids, index=index, logprobs=some))
    shared.end()
    again = [reply(event, WorkerLoad) for event in joined(await request.take()) if isinstance(event, NewTokens)]
    assert max(message.ByteSize() for message in again) < MESSAGE_BYTES / 32
    assert [token for message in again for token in message.tokens.ids] == list(range(5_000))
    assert sum(len(message.tokens.logprobs) for message in again) == 5_000


async def test_an_error_comes_behind_all_that_was_said() -> None:
    request = RequestStream(A, TokenStream())
    request.put(tokens(0, 5))
    error = Draining("the worker stops")
    request.fail(error)
    assert await request.take() == [tokens(0, 5), error]


async def test_a_failure_of_the_engine_comes_behind_all_that_was_said() -> None:
    shared = TokenStream()
    request = RequestStream(A, shared)
    request.put(tokens(0, 5))
    failed = over(failure=Failure.of(NumericalError("NaN")))
    request.put(failed)
    assert await request.take() == [tokens(0, 5), failed]
    assert await shared.take() == [tokens(0, 5)]


async def test_a_caller_that_does_not_end_its_call_after_the_last_word_gets_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "LINGER_S", 0.02)
    request = RequestStream(A, TokenStream())
    request.put(tokens(0, 5))
    request.put(over())
    assert request.over
    assert await request.take() == [tokens(0, 5), over()]


async def test_a_request_that_is_over_is_not_said_again() -> None:
    shared = TokenStream()
    request = RequestStream(A, shared)
    request.put(tokens(0, 5))
    request.close()
    shared.end()
    request.go_alone()
    request.put(over())
    assert await request.take() == [over()]


async def test_a_request_without_a_token_stream_is_said_over_its_own_call() -> None:
    request = RequestStream(A, None)
    request.put(tokens(0, 5))
    request.put(over())
    assert await request.take() == [tokens(0, 5), over()]


def test_who_is_behind_gets_one_answer_of_each_request_with_all_its_tokens() -> None:
    events = [tokens(0, 5), tokens(0, 7, of=B), tokens(1, 6), tokens(1, 8, of=B), over(B)]
    [message] = messages(events, WorkerLoad)
    assert [(each.reservation_id, each.answer.WhichOneof("event")) for each in message.answers] == [
        ("a", "tokens"),
        ("b", "tokens"),
        ("b", "finish"),
    ]
    assert [list(each.answer.tokens.ids) for each in message.answers[:2]] == [[5, 6], [7, 8]]


def test_no_message_holds_more_than_its_share_of_values() -> None:
    events = [tokens(0, *range(15_000), of=ReservationId(f"r{each}")) for each in range(5)]
    events.append(tokens(0, *range(20_000), scored=True))
    sizes = [[len(each.answer.tokens.ids) for each in message.answers] for message in messages(events, WorkerLoad)]
    assert sizes == [[15_000, 15_000], [15_000, 15_000], [15_000], [20_000]]
