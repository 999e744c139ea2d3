"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Unpack

import grpc

from paceline import wire
from paceline.client import asking, convert
from paceline.client.sync import CALL_S, MARGIN_S
from paceline.client.types import Chunk, Completion, Health, Loads, Message, ModelInfo, Sampling, ServerInfo
from paceline.errors import EngineError
from paceline.types import Role


class AsyncStream(AsyncIterator[Chunk]):
    """An answer under way. Leaving it early (`cancel`, `async with`, dropping it) cancels the request."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._finished = False
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Chunk:
        """The next piece. Raises the fitting PacelineError where the request fails."""
        if self._finished:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            self._finished = True
            raise convert.failure(error, self._address) from error
        if message is grpc.aio.EOF:
            self._finished = True
            raise StopAsyncIteration
        return convert.chunk_from_proto(message)

    async def complete(self) -> Completion:
        """Waits for the rest, and gives it as one answer."""
        chunks = [chunk async for chunk in self]
        if not chunks or chunks[-1].finish is None:
            raise EngineError("the router ended the answer without saying why")
        return convert.completion(chunks)

    def cancel(self) -> None:
        """Ends the request, wherever it is. Does nothing to an answer that has ended."""
        if not self._finished:
            self._finished = True
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # grpc.aio keeps a call that nobody reads alive; and the collector may run on any thread.
        if not self._finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)


class AsyncClient:
    """Talks to a router from a running event loop.

    ::

        async with AsyncClient("127.0.0.1:7070") as client:
            async with client.generate("The wind", max_tokens=64) as stream:
                async for chunk in stream:
                    print(chunk.text, end="", flush=True)
            answer = await client.complete([1, 2, 3], max_tokens=8, temperature=0)

    Every method raises errors of `paceline.errors`; a router that cannot be reached is a WorkerLost. An address that is
    not host:port, and an argument that fits no request, is an InvalidRequest.
    """

    def __init__(self, address: str = "127.0.0.1:7070") -> None:
        self.address = asking.checked_address(address)
        self._channel = grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        self._router: Any = convert.RouterStub(self._channel)
        self._health: Any = convert.HealthStub(self._channel)

    def generate(
        self,
        prompt: asking.Prompt,
        *,
        request_id: str = "",
        timeout: float | None = None,
        model: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Streams the continuation of a text or of token ids. `timeout` in seconds bounds queue and work together."""
        return self._stream(prompt, request_id, timeout, model, priority, cache_salt, sampling)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        request_id: str = "",
        timeout: float | None = None,
        model: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Streams the next turn of a conversation, which the model's own template renders."""
        asking.check_messages(messages)
        return self._stream(messages, request_id, timeout, model, priority, cache_salt, sampling)

    async def complete(
        self,
        prompt: asking.Prompt | Sequence[Message],
        *,
        request_id: str = "",
        timeout: float | None = None,
        model: str = "",
        priority: int | None = None,
        cache_salt: str = "",
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole answer to a text, token ids or a conversation."""
        async with self._stream(prompt, request_id, timeout, model, priority, cache_salt, sampling) as stream:
            return await stream.complete()

    def _stream(
        self,
        prompt: asking.Prompt | Sequence[Message],
        request_id: str,
        timeout: float | None,
        model: str,
        priority: int | None,
        cache_salt: str,
        sampling: Sampling,
    ) -> AsyncStream:
        request = asking.generate_request(
            prompt,
            sampling=sampling,
            request_id=request_id,
            timeout=timeout,
            model=model,
            priority=priority,
            cache_salt=cache_salt,
        )
        deadline = None if timeout is None else timeout + MARGIN_S
        return AsyncStream(self._router.Generate(request, timeout=deadline), self.address)

    async def model_info(self) -> ModelInfo:
        """The model served."""
        with _errors(self.address):
            return convert.model_info_from_proto(await self._router.GetModelInfo(convert.MODEL_INFO, timeout=CALL_S))

    async def server_info(self) -> ServerInfo:
        """The router's process."""
        with _errors(self.address):
            answer = await self._router.GetServerInfo(convert.SERVER_INFO, timeout=CALL_S)
            return convert.server_info_from_proto(answer.server)

    async def loads(self) -> Loads:
        """The queue, and every live worker with its load."""
        with _errors(self.address):
            return convert.loads_from_proto(await self._router.GetLoads(convert.LOADS, timeout=CALL_S))

    async def abort(self, request_id: str) -> bool:
        """Ends a request by its id; False where it was unknown or had ended."""
        with _errors(self.address):
            return bool((await self._router.Abort(asking.abort_request(request_id), timeout=CALL_S)).found)

    async def health(self, *, service: str = "", timeout: float = CALL_S) -> Health:
        """What the router's health service says. InvalidRequest for an unknown service, or no time to wait."""
        asking.check_timeout(timeout)
        try:
            answer = await self._health.Check(asking.health_request(service), timeout=timeout)
        except grpc.RpcError as error:
            raise convert.health_failure(error, self.address, service) from error
        return convert.health_from_proto(answer)

    async def close(self) -> None:
        """Closes the channel, which cancels what is under way. Any call after it raises InvalidRequest."""
        self._router = self._health = convert.Closed()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


async def worker_info_async(address: str, role: Role, *, timeout: float = CALL_S) -> ServerInfo:
    """Asks a worker itself, at the address its router knows, about its process."""
    async with grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
        with _errors(address):
            method, request = convert.worker_info_call(channel, role)
            return convert.server_info_from_proto((await method(request, timeout=timeout)).server)


@contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise convert.failure(error, address) from error
