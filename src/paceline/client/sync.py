"""The blocking client, over a blocking gRPC channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Unpack

import grpc

from paceline import wire
from paceline.client import asking, convert
from paceline.client.types import Chunk, Completion, Health, Loads, Message, ModelInfo, Sampling, ServerInfo
from paceline.errors import EngineError
from paceline.types import Role, WorkerLoad

CALL_S: Final = 5.0
"""Seconds that short calls get."""

MARGIN_S: Final = 2.0
"""Seconds beyond a request's timeout until the client itself gives up, so that the router's own error comes first."""


class Stream(Iterator[Chunk]):
    """An answer under way. Leaving it early, by `cancel`, its `with` block or by dropping it, cancels the request."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._finished = False

    def __next__(self) -> Chunk:
        """The next piece. Raises the fitting PacelineError where the request fails."""
        if self._finished:
            raise StopIteration
        try:
            chunk = convert.chunk_from_proto(next(self._call))
        except StopIteration:
            self._finished = True
            raise
        except grpc.RpcError as error:
            self._finished = True
            raise convert.failure(error, self._address) from error
        return chunk

    def complete(self) -> Completion:
        """Waits for the rest, and gives it as one answer."""
        chunks = list(self)
        if not chunks or chunks[-1].finish is None:
            raise EngineError("the router ended the answer without saying why")
        return convert.completion(chunks)

    def cancel(self) -> None:
        """Ends the request, wherever it is. Does nothing to an answer that has ended."""
        if not self._finished:
            self._finished = True
            self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client:
    """Talks to a router. Safe to share between threads.

    ::

        with Client("127.0.0.1:7070") as client:
            for chunk in client.chat([Message("user", "What is a peloton?")], max_tokens=64):
                print(chunk.text, end="", flush=True)
            answer = client.complete([1, 2, 3], max_tokens=8, temperature=0)
            print(answer.token_ids, answer.finish.timings.first_token_s)

    Every method raises errors of `paceline.errors`; a router that cannot be reached is a WorkerLost. An address that is
    not host:port, and an argument that fits no request, is an InvalidRequest.
    """

    def __init__(self, address: str = "127.0.0.1:7070") -> None:
        self.address = asking.checked_address(address)
        self._channel = grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        self._router: Any = convert.RouterStub(self._channel)

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
    ) -> Stream:
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
    ) -> Stream:
        """Streams the next turn of a conversation, which the model's own template renders."""
        asking.check_messages(messages)
        return self._stream(messages, request_id, timeout, model, priority, cache_salt, sampling)

    def complete(
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
        with self._stream(prompt, request_id, timeout, model, priority, cache_salt, sampling) as stream:
            return stream.complete()

    def _stream(
        self,
        prompt: asking.Prompt | Sequence[Message],
        request_id: str,
        timeout: float | None,
        model: str,
        priority: int | None,
        cache_salt: str,
        sampling: Sampling,
    ) -> Stream:
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
        return Stream(self._router.Generate(request, timeout=deadline), self.address)

    def model_info(self) -> ModelInfo:
        """The model served."""
        with _errors(self.address):
            return convert.model_info_from_proto(self._router.GetModelInfo(convert.MODEL_INFO, timeout=CALL_S))

    def server_info(self) -> ServerInfo:
        """The router's process."""
        with _errors(self.address):
            answer = self._router.GetServerInfo(convert.SERVER_INFO, timeout=CALL_S)
            return convert.server_info_from_proto(answer.server)

    def loads(self) -> Loads:
        """The queue, and every live worker with its load."""
        with _errors(self.address):
            return convert.loads_from_proto(self._router.GetLoads(convert.LOADS, timeout=CALL_S))

    def abort(self, request_id: str) -> bool:
        """Ends a request by its id; False where it was unknown or had ended."""
        with _errors(self.address):
            return bool(self._router.Abort(asking.abort_request(request_id), timeout=CALL_S).found)

    def close(self) -> None:
        """Closes the channel, which cancels what is under way. Any call after it raises InvalidRequest."""
        self._router = convert.Closed()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def health(address: str, *, service: str = "", timeout: float = CALL_S) -> Health:
    """What the health service at `host:port` says; WorkerLost or DeadlineExceeded where nobody answers.

    InvalidRequest for an address that is none, for a service that the server does not have, and for a timeout that is
    not positive.
    """
    asking.check_timeout(timeout)
    with grpc.insecure_channel(asking.checked_address(address), options=wire.CHANNEL_OPTIONS) as channel:
        stub = convert.HealthStub(channel)
        try:
            return convert.health_from_proto(stub.Check(asking.health_request(service), timeout=timeout))
        except grpc.RpcError as error:
            raise convert.health_failure(error, address, service) from error


def worker_info(address: str, role: Role, *, timeout: float = CALL_S) -> ServerInfo:
    """Asks a worker itself, at the address its router knows, about its process."""
    with grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel, _errors(address):
        method, request = convert.worker_info_call(channel, role)
        return convert.server_info_from_proto(method(request, timeout=timeout).server)


def worker_load(address: str, role: Role, *, timeout: float = CALL_S) -> WorkerLoad:
    """Asks a worker itself for its load, which is newer than what its router heard last."""
    with grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel, _errors(address):
        method, request = convert.worker_load_call(channel, role)
        return wire.load_from_proto(method(request, timeout=timeout).load)


@contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise convert.failure(error, address) from error
