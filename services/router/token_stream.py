"""What one decode worker says of all requests of this router: one call while the worker lives, a message a step.

A message for each request and step would cost both processes many times what the tokens are worth
(docs/decisions/one-token-stream.md). Each request keeps a call of its own: its refusal, its errors and its cancellation
are that call's. The worker goes on over it, from the answer's beginning, where this stream breaks, and uses only it
where it has never heard of token streams. So a stream that is not there costs time, and no token.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Final

import grpc

from paceline.log import get_logger
from paceline.protos import decode_pb2
from paceline.services.router.registry import WorkerInfo
from paceline.types import ReservationId

_log = get_logger(__name__)

_REOPEN_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits before a stream that broke is opened again; the last one for good."""

Hearer = Callable[[decode_pb2.DecodeGenerateResponse], None]


class TokenStream:
    """One life of one worker. `open_call` starts StreamTokens. Close it once, before its channel."""

    def __init__(self, open_call: Callable[[decode_pb2.StreamTokensRequest], Any], worker: WorkerInfo) -> None:
        self.name = uuid.uuid4().hex
        """What Generate calls name it by. The same when it is opened again: the worker then ends the earlier one."""
        self._open_call = open_call
        self._worker = worker
        self._hearers: dict[ReservationId, Hearer] = {}
        self._task = asyncio.get_running_loop().create_task(self._keep_open())

    def join(self, reservation_id: ReservationId, hear: Hearer) -> None:
        """Passes what is said of a reservation to `hear`, which never raises."""
        self._hearers[reservation_id] = hear

    def leave(self, reservation_id: ReservationId) -> None:
        """Passes nothing more on. A second call does nothing."""
        self._hearers.pop(reservation_id, None)

    async def close(self) -> None:
        """Ends the call."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_open(self) -> None:
        """Reads until closed, or until it is known that the worker cannot do this."""
        breaks = 0
        while True:
            call = self._open_call(decode_pb2.StreamTokensRequest(token_stream=self.name, epoch=self._worker.key.epoch))
            try:
                async for message in call:
                    breaks = 0
                    self._pass_on(message)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _log.info("worker has no token stream", worker=str(self._worker.key))
                    return
                _log.info("token stream broke", worker=str(self._worker.key), error=error.details())
            except Exception as defect:  # noqa: BLE001 - a message that cannot be read, say: the next ones may be
                _log.error("token stream broke", worker=str(self._worker.key), exc_info=defect)
            finally:
                call.cancel()
            await asyncio.sleep(_REOPEN_S[min(breaks, len(_REOPEN_S) - 1)])
            breaks += 1

    def _pass_on(self, message: decode_pb2.StreamTokensResponse) -> None:
        hearers = self._hearers
        for each in message.answers:
            hear = hearers.get(ReservationId(each.reservation_id))
            if hear is not None:  # else its request has ended here
                hear(each.answer)
