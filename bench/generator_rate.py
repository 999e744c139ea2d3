"""How many tokens a second the load generator itself can take, from servers that stream as fast as they can.

A figure of a server is worth something only well below it. Both servers run beside the generator, on the same
processors, and are what limits most figures here: the generator's own share of a processor says how far it is from its
limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import uvloop

from cluster import HOST, free_run
from paceline import wire
from paceline.errors import PacelineError
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.measure import Result, measure
from paceline.protos import common_pb2, router_pb2, router_pb2_grpc
from report import Report

LEAST = 5_000.0
TOKENS = 500
READY_S = 30.0
Servicer: Any = router_pb2_grpc.RouterServicer


class Fast(Servicer):  # type: ignore[misc] # the generated base has no types
    """A router that has every token at once."""

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """One message a token."""
        for place in range(request.sampling.max_tokens):
            yield router_pb2.GenerateResponse(token_ids=[place], token_index=place)
        yield router_pb2.GenerateResponse(finish=router_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH))

    async def GetModelInfo(self, request: Any, context: Any) -> router_pb2.GetModelInfoResponse:
        """A model of any length."""
        limits = common_pb2.Limits(vocab_size=1000, context_tokens=2**20, pool_blocks=2**16)
        return router_pb2.GetModelInfoResponse(model="fast", limits=limits)

    async def GetLoads(self, request: Any, context: Any) -> router_pb2.RouterGetLoadsResponse:
        """Nobody works."""
        return router_pb2.RouterGetLoadsResponse()


async def serve_grpc(port: int) -> None:
    """Until it is killed."""
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    add: Any = router_pb2_grpc.add_RouterServicer_to_server
    add(Fast(), server)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


def serve_http(port: int) -> None:
    """Until it is killed."""
    from aiohttp import web

    piece = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a","finish_reason":null,"token_ids":[1]}]}\n\n'

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fast"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        count = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await response.write(piece)
            await asyncio.sleep(0)  # the others' turn: else each answer comes in one piece
        usage = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % count
        await response.write(b"data: %s\n\ndata: [DONE]\n\n" % usage)
        return response

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/completions", completions)
    web.run_app(application, host=HOST, port=port, print=None)


@contextlib.contextmanager
def server(kind: str) -> Iterator[int]:
    """A server in a process of its own, at the port that is given."""
    port = free_run(1)
    process = subprocess.Popen([sys.executable, __file__, "--serve", kind, str(port)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def drive(*, processes: int, concurrency: int, **target: Any) -> Result:
    """Sends requests until the server answers at all, and then the load."""
    config = BenchConfig(
        concurrency=concurrency,
        requests=4 * concurrency,
        processes=processes,
        input_len=16,
        output_len=TOKENS,
        warmup=processes,
        **target,
    )
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return asyncio.run(measure(config, lambda progress, expected: None))
        except PacelineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    """0 where one process takes 5,000 tokens a second, by either way."""
    report = Report("generator-rate")
    with report:
        for kind in ("grpc", "http"):
            for processes in (1, 2):
                with server(kind) as port:
                    target = (
                        {"router": f"{HOST}:{port}"}
                        if kind == "grpc"
                        else {"openai": f"http://{HOST}:{port}/v1", "vocab_size": 1000}
                    )
                    result = drive(processes=processes, concurrency=32, **target)
                name = f"{kind}, {processes} process{'es' if processes > 1 else ''}"
                report.at_least(f"{name}: tokens a second", result.summary.whole.tokens_per_s, LEAST)
                report.equal(f"{name}: failed requests", result.summary.sent - result.summary.succeeded, 0)
                busy = ", ".join(f"{use.cpu_share:.0%}" for use in result.generators)
                report.note(f"{name}: of a processor", busy)
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        kind, port = sys.argv[2], int(sys.argv[3])
        if kind == "grpc":
            uvloop.run(serve_grpc(port))
        else:
            serve_http(port)
    sys.exit(main())
