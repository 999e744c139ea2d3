"""Reading of requests into the router's own type."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import wire
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import ExceedsPool, InvalidRequest, PromptTooLong, UnknownModel
from paceline.protos import common_pb2, router_pb2
from paceline.services.router import prompt
from paceline.services.router.prompt import PromptReader, Request, own_limits, read_request_id
from paceline.testing.router_bench import byte_tokenizer, ids_of
from paceline.text import ChatTemplate, Tokenizer
from paceline.types import Limits, RequestId

TOKENIZER = byte_tokenizer()
LIMITS = Limits(vocab_size=512, context_tokens=100, pool_blocks=5)


@pytest.fixture
def reader() -> Iterator[PromptReader]:
    reader = PromptReader("m", TOKENIZER, ChatTemplate(TOKENIZER), timeout_s=600.0)
    yield reader
    reader.close()


def message(**fields: Any) -> router_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(**{"max_tokens": 8, **fields.pop("sampling", {})})
    return router_pb2.GenerateRequest(sampling=sampling, **fields)


async def read(reader: PromptReader, request: router_pb2.GenerateRequest, *, limits: Limits = LIMITS) -> Request:
    return await reader.read(request, request_id=RequestId("r"), limits=limits)


def tokens(*ids: int) -> router_pb2.TokenIds:
    return router_pb2.TokenIds(ids=ids)


async def test_text_tokens_and_chat_become_ids(reader: PromptReader) -> None:
    assert (await read(reader, message(text="héy"))).prompt == tuple(ids_of("héy"))
    assert (await read(reader, message(tokens=tokens(7, 8)))).prompt == (7, 8)
    turns = [router_pb2.ChatMessage(role="user", content="hi")]
    assert (await read(reader, message(chat=router_pb2.Chat(messages=turns)))).prompt == tuple(ids_of("u:hi;"))


async def test_control_tokens_in_a_text_stay_text(reader: PromptReader) -> None:
    assert (await read(reader, message(text="</s>"))).prompt == tuple(ids_of("</s>"))


async def test_a_seed_is_drawn_where_none_is_given_and_zero_is_one(reader: PromptReader) -> None:
    drawn = {(await read(reader, message(text="a"))).sampling.seed for _ in range(3)}
    assert len(drawn) == 3
    assert (await read(reader, message(text="a", sampling={"seed": 0}))).sampling.seed == 0


async def test_the_timeout_is_the_requests_own_or_the_routers(reader: PromptReader) -> None:
    assert (await read(reader, message(text="a"))).timeout_s == 600.0
    assert (await read(reader, message(text="a", timeout=wire.duration(1.5)))).timeout_s == 1.5
    for bad in (0.0, -1.0, 86_401.0):
        with pytest.raises(InvalidRequest, match="timeout"):
            await read(reader, message(text="a", timeout=wire.duration(bad)))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({}, InvalidRequest, "one of text, tokens and chat"),
        ({"text": ""}, InvalidRequest, "empty"),
        ({"tokens": tokens()}, InvalidRequest, "empty"),
        ({"tokens": tokens(3, 512)}, InvalidRequest, r"id 512 at index 1 is not in \[0, 512\)"),
        ({"chat": router_pb2.Chat()}, InvalidRequest, "messages"),
        ({"text": "a", "model": "other"}, UnknownModel, "'other' is not served here; 'm' is"),
        ({"text": "a" * 93}, PromptTooLong, "93 prompt tokens . max_tokens 8 = 101 is over the context of 100"),
        ({"text": "a" * 80}, ExceedsPool, "the pool has 5"),
        ({"text": "a", "sampling": {"temperature": float("nan")}}, InvalidRequest, "temperature: nan"),
        ({"text": "a", "sampling": {"stop": [""]}}, InvalidRequest, "stop"),
        ({"text": "a", "sampling": {"stop_token_ids": [3] * 2_000}}, InvalidRequest, "2000 ids are over the limit"),
        ({"text": "a", "sampling": {"n": 33}}, InvalidRequest, "n: 33 is not from 1 to 32"),
        ({"text": "a", "sampling": {"logprobs": 21}}, InvalidRequest, "logprobs: 21 is not from 0 to 20"),
        ({"text": "a", "sampling": {"logit_bias": {512: 1.0}}}, InvalidRequest, "logit_bias: id 512"),
    ],
)
async def test_a_faulty_request_is_refused_by_name_value_and_limit(
    reader: PromptReader, fields: dict[str, Any], error: type[InvalidRequest], said: str
) -> None:
    with pytest.raises(error, match=said):
        await read(reader, message(**fields))


async def test_a_prompt_that_just_fits_is_served(reader: PromptReader) -> None:
    limits = Limits(vocab_size=512, context_tokens=100, pool_blocks=7)
    assert len((await read(reader, message(text="a" * 92), limits=limits)).prompt) == 92


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": router_pb2.TokenIds(ids=[5] * 1_000_000)},
        {"text": "a" * 15_000_000},
        {"chat": router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="a" * 15_000_000)])},
        {"chat": router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user")] * 200_000)},
    ],
)
async def test_a_huge_prompt_is_refused_by_its_length_alone(
    reader: PromptReader, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("the prompt was looked at")

    monkeypatch.setattr(Tokenizer, "encode", looked_at)
    monkeypatch.setattr(ChatTemplate, "encode", looked_at)
    monkeypatch.setattr(prompt, "check_prompt", looked_at)
    with pytest.raises(PromptTooLong, match="over the context of 100"):
        await read(reader, message(**fields))


async def test_the_loop_turns_while_a_prompt_is_tokenised(reader: PromptReader) -> None:
    limits = Limits(vocab_size=512, context_tokens=10_000_000, pool_blocks=10_000_000)
    reading = asyncio.create_task(read(reader, message(text="ab " * 300_000), limits=limits))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert len((await reading).prompt) == 900_000
    # One where it is done on the loop, and a few where the lock of the interpreter is held nearly all the while.
    assert turns > 20


async def test_a_short_text_waits_for_no_long_one(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, encode = threading.Event(), Tokenizer.encode

    def held_up(tokenizer: Tokenizer, text: str, **settings: Any) -> list[int]:
        assert len(text) < prompt._LONG_CHARACTERS or opened.wait(30)
        return encode(tokenizer, text, **settings)

    monkeypatch.setattr(Tokenizer, "encode", held_up)
    limits = Limits(vocab_size=512, context_tokens=1_000_000, pool_blocks=1_000_000)
    turns = [router_pb2.ChatMessage(role="user", content="a" * 40_000)] * 2
    long: list[dict[str, Any]] = [{"text": "a" * 80_000}, {"chat": router_pb2.Chat(messages=turns)}]
    readings = [asyncio.create_task(read(reader, message(**fields), limits=limits)) for fields in long * 2]
    try:
        async with asyncio.timeout(30):
            assert len((await read(reader, message(text="abc"), limits=limits)).prompt) == 3
        assert not any(reading.done() for reading in readings)
    finally:
        opened.set()
    assert all(len(request.prompt) >= 80_000 for request in await asyncio.gather(*readings))


async def test_a_model_without_a_tokenizer_serves_ids_alone() -> None:
    tokenizer = Tokenizer(None, SHAPES["tiny"])
    reader = PromptReader("m", tokenizer, None, timeout_s=1.0)
    limits = own_limits(tokenizer, context_tokens=2_048)
    try:
        assert (await read(reader, message(tokens=tokens(7)), limits=limits)).prompt == (7,)
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await read(reader, message(text="a"), limits=limits)
        with pytest.raises(InvalidRequest, match="no chat template"):
            await read(reader, message(chat=router_pb2.Chat()), limits=limits)
    finally:
        reader.close()


def test_request_ids_are_drawn_or_fit_for_a_log_line() -> None:
    assert read_request_id("", draw=lambda: "drawn") == "drawn"
    assert read_request_id("a-B_c.1:2@x/y") == "a-B_c.1:2@x/y"
    for bad in ("a b", "x" * 129, "line\nbreak", "é"):
        with pytest.raises(InvalidRequest, match="request_id"):
            read_request_id(bad)
