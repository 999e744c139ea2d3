"""Keeps a worker registered with every router, and knows the live workers of the other tier.

A worker registers with a full description, and renews it by heart-beats. A router that does not know it (it restarted)
answers NOT_FOUND, and the worker registers again. Peers come with the answers: a prefill and a decode worker talk to
each other only after each found the other here, never on a client's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import grpc
import msgspec

from paceline import wire
from paceline.errors import PacelineError, StaleEpoch, Status
from paceline.log import get_logger
from paceline.protos import common_pb2, router_pb2, router_pb2_grpc
from paceline.services.worker.outage import Outage, Trouble
from paceline.types import WorkerKey, WorkerLoad

_log = get_logger(__name__)

_CALL_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_RESOLVE_TIMEOUT_S: Final = 2.0
_ASKS: Final = 2  # the first answer may be to a heart-beat that was under way, and know less than the router does now


class PeerInfo(msgspec.Struct, frozen=True):
    """A worker of the other tier."""

    key: WorkerKey
    address: str
    lock_id: str = ""
    claim_token: bytes = b""  # never shown

    def __repr__(self) -> str:
        return f"PeerInfo({self.key} at {self.address})"


class Registration:
    """The worker's side of the registry. `on_peer` hears of each new life of a peer, once."""

    def __init__(
        self,
        routers: tuple[str, ...],
        info: common_pb2.WorkerInfo,
        *,
        load: Callable[[], WorkerLoad],
        draining: Callable[[], bool],
        on_peer: Callable[[PeerInfo], None],
    ) -> None:
        self._info = info
        self._load = load
        self._draining = draining
        self._on_peer = on_peer
        self._newest: dict[str, PeerInfo] = {}
        self._links = [_RouterLink(self, address) for address in routers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to register, in the background, for as long as it takes."""
        self._tasks = [asyncio.create_task(link.run(), name=f"registration at {link.address}") for link in self._links]

    async def close(self) -> None:
        """Stops the heart-beats."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()

    def hurry(self) -> None:
        """Makes the next heart-beats now: the load, or draining, has changed."""
        for link in self._links:
            link.due.set()

    async def resolve(self, key: WorkerKey) -> PeerInfo:
        """The peer with exactly this epoch. Asks the routers if it is unknown; StaleEpoch if that does not help."""
        for _ in range(_ASKS):
            peer = self._newest.get(key.worker_id)
            if peer is not None and peer.key.epoch >= key.epoch:
                break
            await self._ask()
        peer = self._newest.get(key.worker_id)
        if peer is None or peer.key != key:
            known = "not registered" if peer is None else f"registered as {peer.key}"
            raise StaleEpoch(f"worker {key} is {known}")
        return peer

    async def _ask(self) -> None:
        """Returns when every router has answered something, or is too late."""
        self.hurry()
        answers = [asyncio.create_task(link.answered()) for link in self._links]
        _, late = await asyncio.wait(answers, timeout=_RESOLVE_TIMEOUT_S)
        for answer in late:
            answer.cancel()

    def knows(self, key: WorkerKey) -> bool:
        """True where this is the newest life of the peer that was heard of."""
        peer = self._newest.get(key.worker_id)
        return peer is not None and peer.key == key

    def learn(self, peers: list[common_pb2.Peer]) -> None:
        """Takes in what a router says of the other tier; an older epoch than a known one is old news."""
        for message in peers:
            peer = PeerInfo(wire.key_from_proto(message.worker), message.address, message.lock_id, message.claim_token)
            known = self._newest.get(peer.key.worker_id)
            if known is None or known.key.epoch < peer.key.epoch:
                self._newest[peer.key.worker_id] = peer
                self._on_peer(peer)

    @property
    def draining(self) -> bool:
        """True where the worker takes nothing new."""
        return self._draining()

    def registering(self) -> router_pb2.RegisterRequest:
        """The full description."""
        return router_pb2.RegisterRequest(
            info=self._info, load=wire.load_to_proto(self._load()), draining=self.draining
        )

    def beating(self) -> router_pb2.HeartbeatRequest:
        """The heart-beat."""
        return router_pb2.HeartbeatRequest(
            worker=self._info.worker, load=wire.load_to_proto(self._load()), draining=self.draining
        )


class _RouterLink:
    """The registration at one router."""

    def __init__(self, registration: Registration, address: str) -> None:
        self.address = address
        self.due = asyncio.Event()
        self._registration = registration
        self._answer = asyncio.Event()
        self._fails = False
        self._outage = Outage()
        self._channel = grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def answered(self) -> None:
        """Returns at the router's next answer."""
        self._answer.clear()
        await self._answer.wait()

    async def close(self) -> None:
        await self._channel.close()

    async def run(self) -> None:
        interval_s: float | None = None  # None: not registered
        while True:
            self.due.clear()  # before the call: what changes while it is under way is told by the next
            try:
                if interval_s is None:
                    interval_s = await self._register()
                else:
                    await self._beat()
                self._fails = False
                self._outage.end()
            except grpc.RpcError as error:
                if self._failed(wire.error_from_rpc(error)):
                    interval_s = None
            pause_s = _RETRY_S if self._fails or interval_s is None else interval_s
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with what is waited for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.due.wait()

    async def _register(self) -> float:
        answer = await self._stub.Register(self._registration.registering(), timeout=_CALL_TIMEOUT_S)
        _log.info("registered", router=self.address)
        self._learn(list(answer.peers))
        return wire.seconds(answer.heartbeat)

    async def _beat(self) -> None:
        answer = await self._stub.Heartbeat(self._registration.beating(), timeout=_CALL_TIMEOUT_S)
        self._learn(list(answer.peers))

    def _learn(self, peers: list[common_pb2.Peer]) -> None:
        self._registration.learn(peers)
        self._answer.set()

    def _failed(self, error: PacelineError) -> bool:
        """True where the router does not know this worker and must be told everything again."""
        self._fails = True
        trouble = self._outage.failed(error, draining=self._registration.draining, now=time.monotonic())
        if trouble is not None:
            say = _log.info if trouble is Trouble.FORGOTTEN else _log.warning
            say(trouble.value, router=self.address, reason=error.reason, error=error.message)
        return error.status in (Status.NOT_FOUND, Status.ABORTED, Status.FAILED_PRECONDITION)
