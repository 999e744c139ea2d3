"""A router on the loopback with a model of bytes, and clients of it, for the tests of the router's request path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import wire
from paceline.checkpoint.dummy import SHAPES
from paceline.config import RouterConfig
from paceline.errors import PacelineError
from paceline.protos import common_pb2, router_pb2, router_pb2_grpc
from paceline.services.router.prompt import PromptReader
from paceline.services.router.server import RouterServer
from paceline.testing.scripted_workers import PATIENCE_S, ScriptedDecode, ScriptedPrefill
from paceline.text import ChatTemplate, Tokenizer
from paceline.text.vocab import Vocab
from paceline.types import WorkerLoad

FIRST_BYTE_ID = 3
"""Ids below are control tokens; id 2 is the end-of-sequence token. Byte b has id FIRST_BYTE_ID + b."""

_CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


def ids_of(text: str) -> list[int]:
    """The ids of a text in the model of bytes."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_of = _byte_alphabet(alphabet)
    control = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary = {**control, **{character: FIRST_BYTE_ID + byte_of[character] for character in alphabet}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in control])
    backend.encode_special_tokens = True
    return Tokenizer(Vocab(backend=backend, control=control, chat_template=_CHAT), SHAPES["tiny"])


def _byte_alphabet(alphabet: list[str]) -> dict[str, int]:
    """The byte behind each character of byte-level BPE: itself where it is printable, in order from U+0100 else."""
    plain = {character: ord(character) for character in alphabet if ord(character) < 0x100}
    others = sorted(set(range(256)) - set(plain.values()))
    return plain | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Asking:
    """One Generate call of a client, read as a test wants."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.pieces: list[router_pb2.GenerateResponse] = []

    async def piece(self) -> router_pb2.GenerateResponse:
        """The next piece. Raises the PacelineError that the call failed with."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                piece = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise wire.error_from_rpc(error) from error
        assert isinstance(piece, router_pb2.GenerateResponse), "the answer has ended"
        self.pieces.append(piece)
        return piece

    async def finish(self) -> router_pb2.Finish:
        """Reads to the end."""
        while not (piece := await self.piece()).HasField("finish"):
            pass
        return piece.finish

    async def error(self) -> PacelineError:
        """Reads to the error that there must be."""
        try:
            await self.finish()
        except PacelineError as error:
            return error
        raise AssertionError("the request was served")

    def cancel(self) -> None:
        """Gives the call up."""
        self._call.cancel()

    @property
    def token_ids(self) -> list[int]:
        """Every token so far; each piece must go on where the last one ended."""
        seen: list[int] = []
        for piece in self.pieces:
            assert piece.token_index == len(seen), f"a piece at {piece.token_index} after {len(seen)} tokens"
            seen += piece.token_ids
        return seen

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(piece.text for piece in self.pieces)


class RouterBench:
    """A served router and what a test does to it."""

    def __init__(self, server: RouterServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.stub: Any = router_pb2_grpc.RouterStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def register(self, *workers: ScriptedPrefill | ScriptedDecode) -> list[router_pb2.RegisterResponse]:
        """Registers workers, in order."""
        return [
            await self.stub.Register(router_pb2.RegisterRequest(info=worker.info, load=wire.load_to_proto(worker.load)))
            for worker in workers
        ]

    async def heartbeat(
        self, worker: ScriptedPrefill | ScriptedDecode, *, load: WorkerLoad | None = None, draining: bool = False
    ) -> router_pb2.HeartbeatResponse:
        """Sends a worker's heart-beat."""
        request = router_pb2.HeartbeatRequest(
            worker=wire.key_to_proto(worker.key), load=wire.load_to_proto(load or worker.load), draining=draining
        )
        try:
            response: router_pb2.HeartbeatResponse = await self.stub.Heartbeat(request)
        except grpc.aio.AioRpcError as error:
            raise wire.error_from_rpc(error) from error
        return response

    def ask(
        self,
        prompt: str | list[int] = "hello",
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int | None = None,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Asking:
        """Starts a request."""
        request = router_pb2.GenerateRequest(
            request_id=request_id,
            sampling=common_pb2.SamplingParams(**{"max_tokens": 8, **sampling}),
            timeout=None if timeout_s is None else wire.duration(timeout_s),
            priority=priority,
            cache_salt=cache_salt,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        return Asking(self.stub.Generate(request))

    async def abort(self, request_id: str) -> bool:
        """Aborts a request by its id; True where there was one."""
        response: router_pb2.RouterAbortResponse = await self.stub.Abort(
            router_pb2.RouterAbortRequest(request_id=request_id)
        )
        return response.found

    async def health(self, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
        """What its health service says."""
        response = await self._health.Check(health_pb2.HealthCheckRequest(service=service))
        status: health_pb2.HealthCheckResponse.ServingStatus = response.status
        return status

    async def loads(self) -> router_pb2.RouterGetLoadsResponse:
        """What the router says of itself."""
        response: router_pb2.RouterGetLoadsResponse = await self.stub.GetLoads(router_pb2.RouterGetLoadsRequest())
        return response

    async def until(
        self,
        *,
        active: int | None = None,
        queued: int | None = None,
        workers: int | None = None,
        hand_offs_watched: int | None = None,
    ) -> None:
        """Waits until the router has so many requests at work, in its queue, workers, and hand-offs under watch."""
        wanted = (active, queued, workers, hand_offs_watched)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                loads = await self.loads()
                seen = (loads.active, loads.queued, len(loads.workers), self.server.fleet.hand_offs_watched)
                if all(want in (None, got) for want, got in zip(wanted, seen, strict=True)):
                    return
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def narrow_client(self) -> AsyncIterator[RouterBench]:
        """Another client, whose window is as small as gRPC allows: a write to it blocks soon where it does not read."""
        options = (*wire.CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}", options=options) as channel:
            yield RouterBench(self.server, channel)

    def claims(self) -> int:
        """Claims on workers that have not been given back."""
        return sum(len(worker.claims) for worker in self.server.fleet.registry)


@asynccontextmanager
async def router_bench(**settings: Any) -> AsyncIterator[RouterBench]:
    """A router with these settings, which serves until the block ends. No claim may be left by then."""
    config = msgspec.structs.replace(RouterConfig(), port=0, metrics_port=None, model="dummy:tiny", **settings)
    server = RouterServer(config, load_reader=_load_bytes)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=wire.CHANNEL_OPTIONS) as channel:
            bench = RouterBench(server, channel)
            yield bench
            await bench.until(active=0, queued=0)
            assert bench.claims() == 0, "every claim on a worker is given back"
            assert server.fleet.hand_offs_watched == 0, "no watch outlives its request"
    finally:
        await server.stop(grace_s=0.0)


def _load_bytes(config: RouterConfig) -> tuple[PromptReader, int]:
    tokenizer = byte_tokenizer()
    reader = PromptReader(SHAPES["tiny"].name, tokenizer, ChatTemplate(tokenizer), timeout_s=config.request_timeout_s)
    return reader, config.context_tokens or SHAPES["tiny"].context_tokens
