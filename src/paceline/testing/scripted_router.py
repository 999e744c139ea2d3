"""A real gRPC server whose answers a test scripts. For testing clients of the router without its parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline import errors, wire
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc, router_pb2, router_pb2_grpc

Script = Callable[[router_pb2.GenerateRequest], Iterator[router_pb2.GenerateResponse]]


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Answers `Generate` with `script`, which may raise a PacelineError, and records what it was asked.

    `cancelled` is set when a caller leaves before the script has ended.
    """

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.aborted: list[str] = []
        self.cancelled = threading.Event()
        self.address = ""
        self.looks = threading.Semaphore(0)  # released with each GetLoads
        self.loads = router_pb2.RouterGetLoadsResponse()
        self.health = health.HealthServicer()
        self.has_chat_template = True
        self.script: Script = lambda request: iter(words(request.request_id or "drawn", "Hello", " world"))

    def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        """Plays the script."""
        self.requests.append(request)
        ended = threading.Event()
        context.add_callback(lambda: None if ended.is_set() else self.cancelled.set())
        try:
            yield from self.script(request)
            ended.set()
        except errors.PacelineError as error:
            ended.set()
            context.set_trailing_metadata(wire.error_metadata(error))
            context.abort(wire.status_code(error), error.message)

    def Abort(self, request: router_pb2.RouterAbortRequest, context: Any) -> router_pb2.RouterAbortResponse:
        """Knows the request `known` alone."""
        self.aborted.append(request.request_id)
        return router_pb2.RouterAbortResponse(found=request.request_id == "known")

    def GetModelInfo(self, request: Any, context: Any) -> router_pb2.GetModelInfoResponse:
        """A tiny model with a tokenizer."""
        limits = common_pb2.Limits(vocab_size=1000, context_tokens=2048, pool_blocks=64)
        return router_pb2.GetModelInfoResponse(
            model="tiny",
            limits=limits,
            eos_token_ids=[2],
            has_tokenizer=True,
            has_chat_template=self.has_chat_template,
        )

    def GetServerInfo(self, request: Any, context: Any) -> router_pb2.RouterGetServerInfoResponse:
        """A router of pid 77."""
        info = common_pb2.ServerInfo(version="1.2.3", model="tiny", uptime=wire.duration(4.5), process_ids=[77])
        return router_pb2.RouterGetServerInfoResponse(server=info)

    def GetLoads(self, request: Any, context: Any) -> router_pb2.RouterGetLoadsResponse:
        """Whatever `loads` holds."""
        self.looks.release()
        return self.loads


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    """A decode worker that knows its process ids."""

    def GetServerInfo(self, request: Any, context: Any) -> decode_pb2.DecodeGetServerInfoResponse:
        """A front of pid 11 with an engine of pid 12."""
        key = common_pb2.WorkerKey(worker_id="decode-0", epoch=9)
        info = common_pb2.ServerInfo(role=common_pb2.ROLE_DECODE, worker=key, process_ids=[11, 12], transport="nixl")
        return decode_pb2.DecodeGetServerInfoResponse(server=info)


def words(request_id: str, *texts: str) -> list[router_pb2.GenerateResponse]:
    """An answer with one token a word, whose last piece has a full finish."""
    pieces = [
        router_pb2.GenerateResponse(request_id=request_id, text=text, token_ids=[100 + index], token_index=index)
        for index, text in enumerate(texts)
    ]
    pieces[-1].finish.CopyFrom(
        router_pb2.Finish(
            reason=common_pb2.FINISH_REASON_STOP,
            usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=len(texts), cached_tokens=1),
            timings=common_pb2.Timings(first_token=wire.duration(0.25), total=wire.duration(1.5)),
            transfer=common_pb2.Transfer(blocks=2, bytes=4096, parts=1, duration=wire.duration(0.002)),
            prefill_worker=common_pb2.WorkerKey(worker_id="prefill-0", epoch=7),
            decode_worker=common_pb2.WorkerKey(worker_id="decode-0", epoch=9),
            attempts=1,
        )
    )
    return pieces


def worker(worker_id: str, role: common_pb2.Role, *, address: str = "127.0.0.1:1") -> router_pb2.RegisteredWorker:
    """A registered worker with half of its pool free."""
    return router_pb2.RegisteredWorker(
        info=common_pb2.WorkerInfo(
            worker=common_pb2.WorkerKey(worker_id=worker_id, epoch=9), role=role, address=address, model="tiny"
        ),
        load=common_pb2.Load(running=2, waiting=1, total_blocks=64, free_blocks=32, committed_blocks=40),
        heartbeat_age=wire.duration(0.3),
    )


@contextmanager
def scripted_router(port: int = 0) -> Iterator[ScriptedRouter]:
    """The server, on a port of the loopback; a free one by default."""
    router = ScriptedRouter()
    server = grpc.server(ThreadPoolExecutor(8), options=wire.SERVER_OPTIONS)
    generated: tuple[Any, Any] = (router_pb2_grpc, decode_pb2_grpc)  # these carry no types
    generated[0].add_RouterServicer_to_server(router, server)
    generated[1].add_DecodeServicer_to_server(ScriptedDecode(), server)
    health_pb2_grpc.add_HealthServicer_to_server(router.health, server)
    router.health.set("", health_pb2.HealthCheckResponse.SERVING)
    router.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield router
    finally:
        server.stop(0).wait()
