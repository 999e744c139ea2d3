from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.checkpoint import Source
from paceline.errors import StartupError, WorkerLost
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.openai_target import OpenAiTarget
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.target import Clock, TargetInfo
from paceline.loadtest.text_prompts import TextPrompts
from paceline.loadtest.workload import Job
from paceline.testing.openai_server import (
    DONE,
    Events,
    OpenAiServer,
    Refusal,
    message,
    openai_server,
    tokens_in_pairs,
    tokens_with_ids,
    usage,
)
from paceline.testing.scripted_router import scripted_router

JOB = Job(index=3, at_s=None, input_tokens=4, output_tokens=5)
PROMPT = [11, 12, 13, 14]


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as running:
        yield running


async def ask(server: OpenAiServer, *, job: Job = JOB, **settings: Any) -> Outcome:
    config = BenchConfig(openai=server.url, concurrency=1, **({"vocab_size": 100} | settings))
    async with OpenAiTarget(config, "salt") as target:
        await target.describe()
        return await target.prepare(job, PROMPT)(Clock(time.monotonic()))


async def test_an_answer_is_stamped_token_by_token_and_counted_by_its_usage(server: OpenAiServer) -> None:
    outcome = await ask(server)
    assert outcome.error is None, outcome.message
    assert (outcome.tokens, outcome.output_tokens, outcome.input_tokens, outcome.cached_tokens) == ([1] * 5, 5, 4, 4)
    assert sorted(outcome.arrivals_s) == outcome.arrivals_s
    assert 0 <= outcome.sent_s <= outcome.arrivals_s[0] <= outcome.arrivals_s[-1] <= outcome.ended_s


async def test_the_request_asks_for_exactly_so_many_tokens(server: OpenAiServer) -> None:
    await ask(server, temperature=0.5)
    [request] = server.requests
    assert request["prompt"] == PROMPT
    assert (request["model"], request["temperature"], request["stream"]) == ("served", 0.5, True)
    assert (request["max_tokens"], request["min_tokens"], request["ignore_eos"]) == (5, 5, True)
    assert request["stream_options"] == {"include_usage": True}


async def test_messages_without_ids_get_their_tokens_from_the_usage(server: OpenAiServer) -> None:
    server.script = tokens_in_pairs
    outcome = await ask(server)
    assert (outcome.error, outcome.tokens, outcome.output_tokens) == (None, [2, 2, 1], 5)
    assert len(outcome.itl_s) == 2, "the closing message without text is none of a token"


async def test_a_held_back_character_still_counts_as_a_token(server: OpenAiServer) -> None:
    def script(request: dict[str, Any]) -> Events:
        yield from (message(text=text) for text in ("a", "", "é", "b"))
        yield message(text="c", finish_reason="length")
        yield usage(request)
        yield DONE

    server.script = script
    assert (await ask(server)).tokens == [1] * 5


async def test_comments_and_blank_lines_are_no_messages(server: OpenAiServer) -> None:
    def script(request: dict[str, Any]) -> Events:
        yield ": ping\n\n"
        yield from tokens_with_ids(request)

    server.script = script
    assert (await ask(server)).tokens == [1] * 5


def too_few(request: dict[str, Any]) -> Events:
    yield message(text="a", token_ids=[1])
    yield usage(request, completion_tokens=1)
    yield DONE


def cut_off(request: dict[str, Any]) -> Events:
    yield message(text="a", token_ids=[1])


def out_of_memory(request: dict[str, Any]) -> Events:
    yield message(text="a", token_ids=[1])
    yield {"error": {"message": "out of memory", "code": 500}}


def nonsense(request: dict[str, Any]) -> Events:
    yield "data: {not json}\n\n"


def refused(request: dict[str, Any]) -> Events:
    raise Refusal(429, "too many requests")
    yield


@pytest.mark.parametrize(
    ("script", "reason", "said"),
    [
        (too_few, "SHORT_ANSWER", "1 tokens came of 5"),
        (cut_off, "ENGINE_ERROR", "without [DONE]"),
        (out_of_memory, "ENGINE_ERROR", "out of memory"),
        (nonsense, "ENGINE_ERROR", "not understood"),
        (refused, "HTTP_429", "too many requests"),
    ],
)
async def test_what_goes_wrong_is_counted_by_reason(server: OpenAiServer, script: Any, reason: str, said: str) -> None:
    server.script = script
    outcome = await ask(server)
    assert outcome.error == reason
    assert said in outcome.message


async def test_a_request_that_does_not_end_in_time_has_failed(server: OpenAiServer) -> None:
    def script(request: dict[str, Any]) -> Events:
        for _ in range(100):
            yield message(text="a", token_ids=[1])
            time.sleep(0.05)

    server.script = script
    outcome = await ask(server, timeout_s=0.3)
    assert (outcome.error, outcome.message) == ("DEADLINE_EXCEEDED", "no end after 0.3 s")


async def test_cancelling_a_request_closes_its_connection_and_is_an_outcome(server: OpenAiServer) -> None:
    begun = threading.Event()

    def script(request: dict[str, Any]) -> Events:
        while True:
            yield message(text="a" * 10_000, token_ids=[1])
            begun.set()
            time.sleep(0.01)

    server.script = script
    task = asyncio.create_task(ask(server))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    outcome = await task
    assert (outcome.error, outcome.message) == ("STOPPED", "the run was stopped")
    assert outcome.output_tokens == len(outcome.arrivals_s)
    assert await asyncio.to_thread(server.left.wait, 30)


async def describe(server: OpenAiServer, **settings: Any) -> TargetInfo:
    async with OpenAiTarget(BenchConfig(openai=server.url, rate=1.0, vocab_size=9, **settings), "") as target:
        return await target.describe()


async def test_the_server_says_its_model_and_its_context(server: OpenAiServer) -> None:
    assert await describe(server) == TargetInfo(address=server.url, model="served", vocab_size=9, context_tokens=4096)
    with pytest.raises(StartupError, match=r"serves \['served'\], and not another"):
        await describe(server, model="another")


async def test_a_server_that_answers_something_else_is_quoted(server: OpenAiServer) -> None:
    server.model = {"name": "unlike OpenAI's"}
    with pytest.raises(StartupError, match=r"/v1/models answered b'\{\"object.*no list of models"):
        await describe(server)


async def test_a_server_that_is_not_there_is_said() -> None:
    with openai_server() as gone:
        pass
    with pytest.raises(WorkerLost, match="no answer from http://"):
        await describe(gone)


async def test_a_port_that_speaks_grpc_is_told_from_a_server_that_is_not_there() -> None:
    with scripted_router() as router:
        config = BenchConfig(openai=f"http://{router.address}/v1", rate=1.0, vocab_size=9)
        async with OpenAiTarget(config, "") as target:
            with pytest.raises(StartupError) as caught:
                await target.describe()
    assert caught.value.message == (
        f"what listens at http://{router.address}/v1 does not speak HTTP; a router's own port is for --router"
    )


@pytest.mark.model
async def test_text_prompts_have_as_many_tokens_as_were_asked_for(default_model: Source, server: OpenAiServer) -> None:
    prompts = TextPrompts.load("smollm2-135m-instruct", cache_dir=default_model.path.parent)  # type: ignore[union-attr]
    texts = [prompts.of([7919 * place * place % prompts.vocab_size for place in range(n)]) for n in (1, 16, 400)]
    assert [len(prompts.tokenizer.encode(text)) for text in texts] == pytest.approx([1, 16, 400], rel=0.02)
    job = dataclasses.replace(JOB, input_tokens=16)
    outcome = await ask(server, job=job, vocab_size=None, tokenizer="smollm2-135m-instruct")
    assert outcome.error is None
    assert isinstance(server.requests[0]["prompt"], str)
