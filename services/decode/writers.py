"""Prefill workers that may write to this pool: which lives were granted blocks, and how it is known that they stopped.

The engine process owns the table of reservations; its orders are carried out here, and the answers carried back, for as
long as it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import msgspec

from paceline import log, wire
from paceline.errors import Overloaded, PacelineError, WorkerLost
from paceline.protos import prefill_pb2, prefill_pb2_grpc
from paceline.services.decode.messages import StopWriter, WriterDead, WriterStopped
from paceline.services.worker.peers import PeerChannels
from paceline.services.worker.registration import PeerInfo
from paceline.types import WorkerKey

_log = log.get_logger(__name__)

_TELL_AGAIN_S: Final = 0.2
_STOP_CALL_S: Final = 60.0
"""How long a prefill worker may take to stop. It answers between two steps, and a loaded machine takes its time; a dead
one fails the call at once."""


class Writers:
    """`send` gives the engine a command, `resolve` finds a registered worker, and `background` runs what takes long."""

    def __init__(
        self,
        send: Callable[[msgspec.Struct], None],
        resolve: Callable[[WorkerKey], Coroutine[Any, Any, PeerInfo]],
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._send = send
        self._resolve = resolve
        self._background = background
        self._granted: dict[WorkerKey, str] = {}  # and the start locks that they hold
        self._stopping: set[StopWriter] = set()  # orders whose answers are awaited
        self._channels = PeerChannels()

    async def close(self) -> None:
        """Closes the channels to them."""
        await self._channels.close()

    def granting(self, writer: WorkerKey, lock_id: str) -> None:
        """A writer that holds this start lock is about to be granted blocks."""
        self._granted[writer] = lock_id

    def found(self, peer: PeerInfo) -> None:
        """A new life of a prefill worker proves those earlier ones dead that held the very lock that it holds."""
        self._channels.replaced(peer.key)
        self._proves(peer.key, peer.lock_id)

    def stop(self, order: StopWriter) -> None:
        """Asks a writer to stop, and tells the engine; an order that comes again while the answer is awaited is one."""
        if order not in self._stopping:
            self._stopping.add(order)
            self._background(self._stop(order))

    def _proves(self, later: WorkerKey, lock_id: str) -> None:
        """`later` holds `lock_id`: earlier writers that held it cannot write any more. Others, elsewhere, may."""
        for writer, held in list(self._granted.items()):
            if writer.worker_id == later.worker_id and writer.epoch < later.epoch and held == lock_id != "":
                del self._granted[writer]
                self._background(self._tell_dead(writer))

    async def _tell_dead(self, writer: WorkerKey) -> None:
        """Told until the engine takes it: nothing else frees what that writer left in quarantine."""
        while True:
            try:
                self._send(WriterDead(writer=writer))
                return
            except Overloaded:
                await asyncio.sleep(_TELL_AGAIN_S)

    async def _stop(self, order: StopWriter) -> None:
        """Tells the engine when nothing of the attempt can be written any more.

        The engine orders it again while it has no answer, so a call that fails is not repeated here.
        """
        try:
            peer = await self._resolve(order.writer)
            stub = prefill_pb2_grpc.PrefillStub(self._channels.to(peer))
            answer = await stub.Abort(
                prefill_pb2.PrefillAbortRequest(
                    reservation_id=order.reservation_id, attempt=order.attempt, epoch=order.writer.epoch
                ),
                timeout=_STOP_CALL_S,
            )
        except (PacelineError, grpc.RpcError) as error:
            translated = error if isinstance(error, PacelineError) else wire.error_from_rpc(error)
            _log.warning(
                "writer not stopped",
                writer=str(order.writer),
                reservation=order.reservation_id,
                reason=translated.reason,
                lost=isinstance(translated, WorkerLost),
            )
            return
        finally:
            self._stopping.discard(order)
        if answer.epoch > order.writer.epoch:
            self._proves(WorkerKey(order.writer.worker_id, answer.epoch), answer.lock_id)
        else:
            self._send(WriterStopped(reservation_id=order.reservation_id, attempt=order.attempt, writer=order.writer))
