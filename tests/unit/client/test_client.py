from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import errors
from paceline.client import AsyncClient, Chunk, Client, Health, Message, health, worker_info, worker_info_async
from paceline.protos import common_pb2, router_pb2
from paceline.testing.scripted_router import ScriptedRouter, scripted_router, words, worker
from paceline.types import FinishReason, Role, Usage, WorkerKey

WAIT_S = 10.0


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with scripted_router() as running:
        yield running


@pytest.fixture
def client(router: ScriptedRouter) -> Iterator[Client]:
    with Client(router.address) as open_client:
        yield open_client


def endless(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
    index = 0
    while True:
        yield router_pb2.GenerateResponse(request_id="endless", text="x", token_ids=[1], token_index=index)
        index += 1
        time.sleep(0.01)


def test_a_stream_yields_chunks_and_ends_with_a_full_finish(client: Client) -> None:
    chunks = list(client.generate("Hi", request_id="r1"))
    assert chunks[0] == Chunk(request_id="r1", text="Hello", token_ids=(100,), index=0)
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP
    assert finish.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert finish.prefill_worker == WorkerKey("prefill-0", 7)
    assert finish.decode_worker == WorkerKey("decode-0", 9)
    assert (finish.transfer.blocks, finish.transfer.bytes, finish.transfer.duration_s) == (2, 4096, 0.002)
    assert (finish.timings.first_token_s, finish.timings.total_s) == (0.25, 1.5)
    assert finish.stop_text is None


def test_complete_joins_text_and_tokens(client: Client) -> None:
    answer = client.complete("Hi")
    assert (answer.text, answer.token_ids) == ("Hello world", (100, 101))


def test_only_the_sampling_parameters_that_were_given_travel(client: Client, router: ScriptedRouter) -> None:
    client.complete("Hi", temperature=0.0, stop="END", stop_token_ids=[5, 6], logit_bias={3: -1.0}, top_k=None)
    sampling = router.requests[0].sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0
    assert not sampling.HasField("max_tokens")
    assert not sampling.HasField("top_k")
    assert list(sampling.stop) == ["END"]
    assert list(sampling.stop_token_ids) == [5, 6]
    assert dict(sampling.logit_bias) == {3: -1.0}


def test_text_token_ids_and_chats_travel_as_what_they_are(client: Client, router: ScriptedRouter) -> None:
    client.complete("Hi", timeout=3.0, model="tiny", priority=-2)
    client.complete([1, 2])
    client.complete([])
    client.chat([Message("system", "Be brief."), Message("user", "Hi")]).complete()
    text, tokens, nothing, chat = router.requests
    assert (text.text, text.model, text.priority, text.timeout.seconds) == ("Hi", "tiny", -2, 3)
    assert list(tokens.tokens.ids) == [1, 2]
    assert nothing.WhichOneof("prompt") == "tokens"
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("Hi", "messages: 'Hi' is not a list of Messages"),
        ([{"role": "user", "content": "Hi"}], "at index 0 is not a Message"),
        ([Message("user", "Hi"), ("user", "Hi")], "at index 1 is not a Message"),
        ([Message("user", "caf\udce9")], "content of message 0: is not UTF-8 at character 3"),
    ],
)
def test_what_is_no_conversation_is_refused_and_not_sent_as_something_else(
    client: Client, router: ScriptedRouter, messages: Any, named: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=re.escape(named)):
        client.chat(messages)
    assert not router.requests


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": "caf\udce9"}, "prompt: is not UTF-8 at character 3"),
        ({"prompt": [1, -5]}, "prompt: id -5 at index 1"),
        ({"prompt": None}, "prompt: None is not a text, a list of token ids, or one of Messages"),
        ({"prompt": b"caf"}, "prompt: b'caf' is not a text"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens: -1 is under the limit of 1"),
        ({"prompt": "x", "max_tokens": 2**32}, "max_tokens: 4294967296 is over the limit of 4294967295"),
        ({"prompt": "x", "max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number"),
        ({"prompt": "x", "seed": -1}, "seed: -1 is not from 0 to 18446744073709551615"),
        ({"prompt": "x", "seed": 2**64}, "seed: 18446744073709551616 is not from 0 to 18446744073709551615"),
        ({"prompt": "x", "top_k": 2**31}, "top_k: 2147483648 is over the limit of 2147483647"),
        ({"prompt": "x", "n": 2, "best_of": -1}, "best_of: -1 is not from n 2 to 32"),
        ({"prompt": "x", "min_tokens": -1, "max_tokens": 8}, "min_tokens: -1 is not from 0 to max_tokens 8"),
        ({"prompt": "x", "min_tokens": -1, "max_tokens": "x"}, "min_tokens: -1 is not from 0 to max_tokens 256"),
        ({"prompt": "x", "temperature": "warm"}, "temperature: 'warm' is not a number"),
        ({"prompt": "x", "ignore_eos": "no"}, "ignore_eos: 'no' is not True or False"),
        ({"prompt": "x", "stop": [3]}, r"stop: \[3\] is not a text or a list of texts"),
        ({"prompt": "x", "stop": ["caf\udce9"]}, "stop: is not UTF-8 at character 3"),
        ({"prompt": "x", "stop_token_ids": [-1]}, r"stop_token_ids: \[-1\] is not a list of token ids"),
        ({"prompt": "x", "logit_bias": [1]}, r"logit_bias: \[1\] is not a mapping from token ids to numbers"),
        ({"prompt": "x", "max_token": 3}, r"max_token: is no sampling parameter; did you mean max_tokens\?"),
        ({"prompt": "x", "warmth": 1}, "warmth: is no sampling parameter; there are max_tokens, temperature, .*"),
        ({"prompt": "x", "timeout": float("nan")}, "timeout: nan is not a positive number"),
        ({"prompt": "x", "timeout": "soon"}, "timeout: 'soon' is not a positive number of seconds"),
        ({"prompt": "x", "priority": 2**40}, "priority: 1099511627776 is not a whole number of 32 bits"),
        ({"prompt": "x", "model": 3}, "model: 3 is not a text"),
        ({"prompt": "x", "request_id": b"r"}, "request_id: b'r' is not a text"),
    ],
)
def test_a_value_that_fits_no_message_is_refused_before_it_travels(
    client: Client, router: ScriptedRouter, options: dict[str, object], named: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"^{named}"):
        client.generate(**options)
    assert router.requests == []


def test_an_error_of_the_router_arrives_as_its_own_type(client: Client, router: ScriptedRouter) -> None:
    def refuse(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        yield words("r", "one", "two")[0]
        raise errors.Overloaded("512 requests wait, the limit", retry_after_s=2.5)

    router.script = refuse
    stream = client.generate("Hi")
    assert next(stream).text == "one"
    with pytest.raises(errors.Overloaded, match="512 requests wait") as caught:
        next(stream)
    assert caught.value.retry_after_s == 2.5
    assert list(stream) == []


def test_an_answer_without_a_finish_is_an_error(client: Client, router: ScriptedRouter) -> None:
    router.script = lambda request: iter(words("r", "one", "two")[:1])
    with pytest.raises(errors.EngineError, match="without saying why"):
        client.complete("Hi")


def test_leaving_the_block_cancels_the_call(client: Client, router: ScriptedRouter) -> None:
    router.script = endless
    with client.generate("Hi") as stream:
        assert next(stream).text == "x"
    assert router.cancelled.wait(WAIT_S)
    assert list(stream) == []


def test_dropping_the_iterator_cancels_the_call(client: Client, router: ScriptedRouter) -> None:
    router.script = endless
    for _chunk in client.generate("Hi"):
        break
    gc.collect()
    assert router.cancelled.wait(WAIT_S)


def test_a_finished_stream_cancels_nothing(client: Client, router: ScriptedRouter) -> None:
    with client.generate("Hi") as stream:
        list(stream)
    client.model_info()
    assert not router.cancelled.is_set()


def test_what_the_router_says_of_itself(client: Client, router: ScriptedRouter) -> None:
    router.loads.queued = 4
    decode = worker("decode-0", common_pb2.ROLE_DECODE)
    router.loads.workers.extend([decode, worker("prefill-0", common_pb2.ROLE_PREFILL)])
    model = client.model_info()
    assert (model.model, model.limits.context_tokens, model.eos_token_ids) == ("tiny", 2048, (2,))
    assert (model.has_tokenizer, model.has_chat_template) == (True, True)
    server = client.server_info()
    assert (server.version, server.role, server.worker, server.process_ids) == ("1.2.3", None, None, (77,))
    loads = client.loads()
    assert loads.queued == 4
    assert [entry.role for entry in loads.workers] == [Role.PREFILL, Role.DECODE]
    assert [entry.key.worker_id for entry in loads.of(Role.DECODE)] == ["decode-0"]
    assert loads.workers[0].load.free_blocks == 32
    assert client.abort("known")
    assert not client.abort("unknown")


def test_a_worker_tells_its_process_ids(router: ScriptedRouter) -> None:
    info = worker_info(router.address, Role.DECODE)
    assert (info.role, info.worker, info.process_ids) == (Role.DECODE, WorkerKey("decode-0", 9), (11, 12))


def test_health_of_a_server_and_of_nobody(router: ScriptedRouter) -> None:
    assert health(router.address) is Health.SERVING
    router.health.enter_graceful_shutdown()
    assert health(router.address) is Health.NOT_SERVING
    with pytest.raises(errors.WorkerLost):
        health("127.0.0.1:1", timeout=WAIT_S)


@pytest.mark.parametrize("address", ["foo", "foo:0", "dns:///foo:7070", "a:1,b:2", "", None])
def test_an_address_that_is_none_is_refused_as_the_command_line_does(address: Any) -> None:
    said = r"^address: .* is not (host:port with a port from 1 to 65535|a text)$"
    for ask in (Client, AsyncClient, health):
        with pytest.raises(errors.InvalidRequest, match=said):
            ask(address)


def test_a_router_that_is_not_there_is_a_lost_worker() -> None:
    with Client("127.0.0.1:1") as nobody:
        with pytest.raises(errors.WorkerLost):
            nobody.complete("Hi")
        with pytest.raises(errors.WorkerLost):
            nobody.loads()


async def test_the_async_client_streams_and_completes(router: ScriptedRouter) -> None:
    async with AsyncClient(router.address) as client:
        texts = [chunk.text async for chunk in client.generate("Hi")]
        answer = await client.complete([Message("user", "Hi")], max_tokens=2)
    assert texts == ["Hello", " world"]
    assert answer.text == "Hello world"
    assert router.requests[1].chat.messages[0].role == "user"
    assert router.requests[1].sampling.max_tokens == 2


async def test_the_async_client_asks_everything_else(router: ScriptedRouter) -> None:
    async with AsyncClient(router.address) as client:
        assert (await client.model_info()).model == "tiny"
        assert (await client.server_info()).uptime_s == 4.5
        assert (await client.loads()).workers == ()
        assert await client.abort("known")
        assert await client.health() is Health.SERVING
    assert (await worker_info_async(router.address, Role.DECODE)).process_ids == (11, 12)


async def test_leaving_the_async_block_cancels_the_call(router: ScriptedRouter) -> None:
    router.script = endless
    async with AsyncClient(router.address) as client, client.generate("Hi") as stream:
        assert (await anext(stream)).text == "x"
    assert await asyncio.to_thread(router.cancelled.wait, WAIT_S)


async def test_dropping_the_async_iterator_cancels_the_call(router: ScriptedRouter) -> None:
    router.script = endless
    async with AsyncClient(router.address) as client:
        stream = client.generate("Hi")
        await anext(stream)
        del stream
        gc.collect()
        assert await asyncio.to_thread(router.cancelled.wait, WAIT_S)


async def test_the_async_client_raises_the_routers_own_error(router: ScriptedRouter) -> None:
    def refuse(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        raise errors.UnknownModel("model", "'gpt' is not served, tiny is")
        yield

    router.script = refuse
    async with AsyncClient(router.address) as client:
        with pytest.raises(errors.UnknownModel, match="'gpt' is not served"):
            await client.complete("Hi", model="gpt")


async def test_an_async_router_that_is_not_there_is_a_lost_worker() -> None:
    async with AsyncClient("127.0.0.1:1") as nobody:
        with pytest.raises(errors.WorkerLost):
            await nobody.complete("Hi")


def test_a_closed_client_refuses_calls(router: ScriptedRouter) -> None:
    client = Client(router.address)
    client.close()
    client.close()
    for call in (client.loads, lambda: client.generate("Hi")):
        with pytest.raises(errors.InvalidRequest, match="closed"):
            call()


async def test_a_closed_async_client_refuses_calls(router: ScriptedRouter) -> None:
    client = AsyncClient(router.address)
    await client.close()
    for call in (client.loads, client.health):
        with pytest.raises(errors.InvalidRequest, match="closed"):
            await call()
    with pytest.raises(errors.InvalidRequest, match="closed"):
        client.generate("Hi")
