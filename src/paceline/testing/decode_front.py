"""A decode front that serves over real gRPC, whose engine is whatever a test makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
import msgspec

from paceline import wire
from paceline.config import DecodeConfig
from paceline.kvtransfer.layout import Fingerprint
from paceline.services.decode.front import DecodeFront
from paceline.services.worker.messages import Ready
from paceline.types import Limits, WorkerKey, WorkerLoad


class Commanded(Protocol):
    """What a front asks of its engine in the middle of its life."""

    load: WorkerLoad

    def send(self, command: msgspec.Struct) -> None:
        """Takes a command of the front's."""


@asynccontextmanager
async def decode_front(engine: Commanded) -> AsyncIterator[tuple[DecodeFront, int]]:
    """The front of d0@1 and its port; it serves until the block ends."""
    front = DecodeFront(DecodeConfig())
    front.key = WorkerKey("d0", 1)
    front.engine = engine  # type: ignore[assignment]
    front.ready = Ready(
        limits=Limits(vocab_size=512, context_tokens=2_048, pool_blocks=64),
        fingerprint=Fingerprint(
            format_version=1,
            model="none",
            weights_digest="none",
            dtype="float32",
            layers=1,
            kv_heads=1,
            head_dim=16,
            block_tokens=16,
        ),
        eos_token_ids=(2,),
        transport="none",
    )
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    front.add_servicer(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield front, port
    finally:
        await server.stop(None)
        await front.close()
