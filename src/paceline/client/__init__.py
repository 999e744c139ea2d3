"""The client: `Client` blocks, `AsyncClient` runs on asyncio; both give frozen values and raise `paceline.errors`.

::

    from paceline.client import Client, Message

    with Client("127.0.0.1:7070") as client:
        for chunk in client.chat([Message("user", "Why do cyclists draft?")], max_tokens=64):
            print(chunk.text, end="", flush=True)
"""

from paceline.client.aio import AsyncClient, AsyncStream, worker_info_async
from paceline.client.sync import Client, Stream, health, worker_info, worker_load
from paceline.client.types import (
    Balance,
    Choice,
    Chunk,
    Completion,
    Finish,
    Health,
    Loads,
    Message,
    ModelInfo,
    Sampling,
    ServerInfo,
    Timings,
    TransferSummary,
    Worker,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Balance",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "Health",
    "Loads",
    "Message",
    "ModelInfo",
    "Sampling",
    "ServerInfo",
    "Stream",
    "Timings",
    "TransferSummary",
    "Worker",
    "health",
    "worker_info",
    "worker_info_async",
    "worker_load",
]
