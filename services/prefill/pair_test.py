"""The start of a pair: measures the bandwidth from this worker to a decode worker, and minds a floor.

A silent fall-back to TCP is the commonest complaint of the field, so a pair below the floor refuses to serve. The test
is an ordinary reservation whose blocks are written to a few times and given up: it needs no RPC of its own, and the
blocks come back by the same proof as any others.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Final, Protocol

import grpc
import msgspec

from paceline import wire
from paceline.config import PrefillConfig
from paceline.errors import FingerprintMismatch, PacelineError, SlowTransport, TransferFailed
from paceline.log import get_logger
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc
from paceline.services.prefill.messages import Attempt, Measured, MeasureTo
from paceline.services.worker.convert import fingerprint_from_proto, fingerprint_to_proto
from paceline.services.worker.messages import Ready
from paceline.services.worker.peers import PeerChannels
from paceline.services.worker.registration import PeerInfo, Registration
from paceline.types import BLOCK_TOKENS, ReservationId, WorkerKey

_log = get_logger(__name__)

_BLOCKS: Final = 16
_TRIES: Final = 5
_TIMEOUT_S: Final = 60.0
_SLOW_PAUSE_S: Final = 0.5


class _Worker(Protocol):
    """What a test needs of the front."""

    config: PrefillConfig
    key: WorkerKey
    ready: Ready
    registration: Registration
    claim_token: bytes

    def send(self, command: msgspec.Struct) -> None:
        """Queues a command for the engine."""


class PairTests:
    """The results by decode worker, and the tests under way."""

    def __init__(self, worker: _Worker, channels: PeerChannels) -> None:
        self._worker = worker
        self._channels = channels
        self._speeds: dict[WorkerKey, float] = {}  # bytes a second
        self._waiting: dict[Attempt, asyncio.Future[Measured]] = {}

    def check(self, target: WorkerKey) -> None:
        """Raises SlowTransport where the pair was measured below the floor. An unmeasured one is given the benefit."""
        config = self._worker.config
        speed = self._speeds.get(target)
        floor = config.transport_floor_mb_s * 1e6
        if speed is not None and speed < floor and not config.allow_slow_transport:
            raise SlowTransport(
                f"{self._worker.key} writes to {target} at {speed / 1e6:.1f} MB/s, under the floor of "
                f"{config.transport_floor_mb_s:g} MB/s (--allow-slow-transport serves all the same)"
            )

    def measured(self, event: Measured) -> None:
        """Takes in the engine's answer."""
        waiting = self._waiting.get(event.attempt)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    async def run(self, peer: PeerInfo) -> None:
        """Tests the pair; a test that cannot run now, or finds it slow, is tried again a few times.

        A busy moment makes any pair look slow, and the verdict holds for the life of both: the best try counts.
        """
        floor, best = self._worker.config.transport_floor_mb_s * 1e6, 0.0
        for number in range(_TRIES):
            if not self._worker.registration.knows(peer.key):
                return  # that life is over
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    speed = await self._measure(peer, number)
            except FingerprintMismatch as error:
                _log.warning("pair does not fit", decode=str(peer.key), error=error.message)
                return
            except (PacelineError, grpc.RpcError, TimeoutError) as error:
                reason = wire.error_from_rpc(error) if isinstance(error, grpc.RpcError) else error
                _log.info("pair not measured", decode=str(peer.key), attempt=number + 1, error=str(reason))
                await asyncio.sleep(2.0**number)
                continue
            best = max(best, speed)
            slow = best < floor
            if slow and number < _TRIES - 1:
                await asyncio.sleep(_SLOW_PAUSE_S)
                continue
            self._speeds[peer.key] = best
            (_log.warning if slow else _log.info)(
                "pair measured",
                decode=str(peer.key),
                transport=self._worker.ready.transport,
                megabytes_per_second=round(best / 1e6),
                tries=number + 1,
                floor=self._worker.config.transport_floor_mb_s,
            )
            return

    async def _measure(self, peer: PeerInfo, number: int) -> float:
        """Bytes a second. Each further try takes fewer blocks: the other pool may be smaller."""
        stub = decode_pb2_grpc.DecodeStub(self._channels.to(peer))
        attempt = Attempt(ReservationId(f"pair-test-{uuid.uuid4().hex}"), 1)
        # A small share of the pool, so that a test never stands in a request's way.
        limits = self._worker.ready.limits
        fitting = min(limits.pool_blocks // (8 * len(limits.most_blocks)), limits.context_tokens // BLOCK_TOKENS - 1)
        num_blocks = max(1, min(_BLOCKS, fitting) >> number)
        stream = stub.Generate(
            decode_pb2.DecodeGenerateRequest(
                request_id=attempt.reservation_id,
                epoch=peer.key.epoch,
                reservation_id=attempt.reservation_id,
                prompt=[0] * (num_blocks * BLOCK_TOKENS),
                sampling=common_pb2.SamplingParams(max_tokens=1),
                cache_salt=attempt.reservation_id,  # none of it is to be there already
            )
        )
        waiting: asyncio.Future[Measured] = asyncio.get_running_loop().create_future()
        self._waiting[attempt] = waiting
        try:
            first = await stream.read()
            if first is grpc.aio.EOF or not first.HasField("reserved"):
                raise TransferFailed(f"{peer.key} reserved nothing for a pair test")
            granted = await _translated(stub.ClaimWrite(self._claim(attempt, peer)))
            self._worker.send(
                MeasureTo(
                    attempt=attempt,
                    target=peer.key,
                    blocks=list(granted.blocks),
                    agent=granted.agent,
                    fingerprint=fingerprint_from_proto(granted.fingerprint),
                )
            )
            result = await waiting
        finally:
            stream.cancel()
            del self._waiting[attempt]
        if result.failure is not None:
            raise result.failure.error()
        return result.bytes_per_second

    def _claim(self, attempt: Attempt, peer: PeerInfo) -> decode_pb2.ClaimWriteRequest:
        return decode_pb2.ClaimWriteRequest(
            reservation_id=attempt.reservation_id,
            attempt=attempt.number,
            decode_epoch=peer.key.epoch,
            writer=wire.key_to_proto(self._worker.key),
            claim_token=self._worker.claim_token,
            fingerprint=fingerprint_to_proto(self._worker.ready.fingerprint),
        )


async def _translated(call: Awaitable[decode_pb2.ClaimWriteResponse]) -> decode_pb2.ClaimWriteResponse:
    try:
        return await call
    except grpc.RpcError as error:
        raise wire.error_from_rpc(error) from error
