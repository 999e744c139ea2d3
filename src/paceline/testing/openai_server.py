"""A real HTTP server that speaks as much of OpenAI's protocol as the load generator hears."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any, Final

Events = Iterator[dict[str, Any] | str]
"""Messages of one answer; a text is written as it is."""

DONE: Final = "data: [DONE]\n\n"


class OpenAiServer:
    """Answers completions with `script`, which may raise `Refusal`, and records what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {"id": "served", "object": "model", "max_model_len": 4096}
        self.script: Callable[[dict[str, Any]], Events] = tokens_with_ids
        self.url = ""
        self.left = threading.Event()
        """Set when a caller leaves before its answer has ended."""


class Refusal(Exception):
    """An answer with another HTTP status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


def tokens_with_ids(request: dict[str, Any]) -> Events:
    """One message a token, each with its id, and the usage at the end: vLLM with `return_token_ids`."""
    for place in range(request["max_tokens"]):
        yield message(text=f" {place}", token_ids=[place])
    yield usage(request)
    yield DONE


def tokens_in_pairs(request: dict[str, Any]) -> Events:
    """Messages of two tokens, without ids: what a server of before does when it speculates."""
    count = request["max_tokens"]
    for place in range(0, count, 2):
        yield message(text=" a b" if place + 2 <= count else " a")
    yield message(text="", finish_reason="length")
    yield usage(request)
    yield DONE


def message(**choice: Any) -> dict[str, Any]:
    """A message of one choice."""
    return {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": None, **choice}]}


def usage(request: dict[str, Any], *, completion_tokens: int | None = None) -> dict[str, Any]:
    """The closing message: prompts count as many tokens as they have ids, or words."""
    prompt = request["prompt"]
    counts = {
        "prompt_tokens": len(prompt.split() if isinstance(prompt, str) else prompt),
        "completion_tokens": request["max_tokens"] if completion_tokens is None else completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    return {"id": "cmpl-1", "choices": [], "usage": counts}


@contextmanager
def openai_server() -> Iterator[OpenAiServer]:
    """The server, on a free port of the loopback."""
    server = OpenAiServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _handler_of(server: OpenAiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"object": "list", "data": [server.model]}))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(request)
            events = server.script(request)
            try:
                first = next(events)
            except Refusal as refusal:
                self._answer(refusal.status, refusal.text)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in chain((first,), events):
                    self._chunk(event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n")
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                self.close_connection = True
                server.left.set()

        def _chunk(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _answer(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
