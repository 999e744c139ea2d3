from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline import wire
from paceline.errors import StaleEpoch, UnknownReservation
from paceline.protos import common_pb2, router_pb2, router_pb2_grpc
from paceline.services.worker.registration import PeerInfo, Registration
from paceline.types import WorkerKey, WorkerLoad


class Router(router_pb2_grpc.RouterServicer):
    """A registry of one worker, which a test may make forget."""

    def __init__(self) -> None:
        self.known = False
        self.registrations = 0
        self.heartbeats: list[router_pb2.HeartbeatRequest] = []
        self.peers: list[common_pb2.Peer] = []
        self.heard = asyncio.Event()

    async def Register(self, _request: Any, _context: Any) -> router_pb2.RegisterResponse:
        self.known = True
        self.registrations += 1
        self.heard.set()
        return router_pb2.RegisterResponse(lease=wire.duration(5), heartbeat=wire.duration(0.05), peers=self.peers)

    async def Heartbeat(self, request: Any, context: Any) -> router_pb2.HeartbeatResponse:
        if not self.known:
            await wire.abort(context, UnknownReservation("who is that?"))
        self.heartbeats.append(request)
        self.heard.set()
        return router_pb2.HeartbeatResponse(peers=self.peers)

    async def hear(self) -> None:
        self.heard.clear()
        async with asyncio.timeout(10):
            await self.heard.wait()


def peer(epoch: int) -> common_pb2.Peer:
    key = common_pb2.WorkerKey(worker_id="decode-0", epoch=epoch)
    return common_pb2.Peer(worker=key, role=common_pb2.ROLE_DECODE, address="127.0.0.1:1")


@pytest.fixture
async def router() -> AsyncIterator[tuple[Router, str]]:
    servicer = Router()
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    router_pb2_grpc.add_RouterServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def registered(router: tuple[Router, str]) -> AsyncIterator[tuple[Router, Registration, list[PeerInfo]]]:
    found: list[PeerInfo] = []
    info = common_pb2.WorkerInfo(worker=common_pb2.WorkerKey(worker_id="prefill-0", epoch=1))
    registration = Registration((router[1],), info, load=WorkerLoad, draining=lambda: False, on_peer=found.append)
    registration.start()
    await router[0].hear()
    yield router[0], registration, found
    await registration.close()


Registered = tuple[Router, Registration, list[PeerInfo]]


async def test_a_worker_registers_and_then_beats(registered: Registered) -> None:
    router, _, _ = registered
    await router.hear()
    await router.hear()
    assert router.registrations == 1
    assert router.heartbeats[0].worker.worker_id == "prefill-0"


async def test_a_router_that_forgot_the_worker_is_told_everything_again(registered: Registered) -> None:
    router, _, _ = registered
    router.known = False
    async with asyncio.timeout(10):
        while router.registrations < 2:
            await router.hear()


async def test_each_new_life_of_a_peer_is_told_once(registered: Registered) -> None:
    router, registration, found = registered
    for epoch in (5, 5, 4, 6, 6):
        router.peers = [peer(epoch)]
        registration.hurry()
        await router.hear()
        await router.hear()
    assert [info.key.epoch for info in found] == [5, 6]


async def test_a_peer_that_is_not_known_yet_is_asked_for(registered: Registered) -> None:
    router, registration, _ = registered
    router.peers = [peer(7)]
    async with asyncio.timeout(10):
        assert (await registration.resolve(WorkerKey("decode-0", 7))).address == "127.0.0.1:1"


async def test_a_peer_that_nobody_knows_or_that_was_replaced_is_stale(registered: Registered) -> None:
    router, registration, _ = registered
    router.peers = [peer(7)]
    with pytest.raises(StaleEpoch, match="registered as decode-0@7"):
        await registration.resolve(WorkerKey("decode-0", 6))
    with pytest.raises(StaleEpoch, match="not registered"):
        await registration.resolve(WorkerKey("decode-9", 1))


@pytest.mark.parametrize("turns", range(4))
async def test_it_closes_also_where_a_hurried_beat_is_about_to_leave(registered: Registered, turns: int) -> None:
    """In Python 3.11 `wait_for` lost the cancellation, and the worker beat on for ever."""
    router, registration, _ = registered
    await router.hear()
    await asyncio.sleep(0.02)  # it has its answer by then, and waits to beat again
    registration.hurry()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await registration.close()
