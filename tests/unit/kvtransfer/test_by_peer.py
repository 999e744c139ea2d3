"""A transport that picks one for each peer, over transports that need no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import msgspec
import pytest

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.by_peer import ByPeerTransport
from paceline.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from paceline.kvtransfer.transports.loopback import Hub, LoopbackTransport
from paceline.kvtransfer.transports.nixl import NixlTransport
from paceline.kvtransfer.transports.transport import Finished, Piece, Transport
from paceline.testing.host_memory import HostMemory

BLOCKS, BLOCK_BYTES = 4, 64


class Worker:
    """A pool, and a transport that has some of both members."""

    def __init__(self, name: str, hub: Hub, *members: str) -> None:
        made: dict[str, Transport] = {
            member: CudaIpcTransport(name, HostMemory()) if member == "near" else LoopbackTransport(hub, name)
            for member in members
        }
        self.pool = ctypes.create_string_buffer(name[:1].encode() * (BLOCKS * BLOCK_BYTES), BLOCKS * BLOCK_BYTES)
        self.region = Region(ctypes.addressof(self.pool), BLOCKS, BLOCK_BYTES)
        self.transport = ByPeerTransport(made)
        self.metadata = self.transport.register(self.region)


@pytest.fixture
def hub() -> Iterator[Hub]:
    yield Hub()


def members_of(metadata: bytes) -> dict[str, bytes]:
    fields = msgspec.msgpack.decode(metadata)
    found: dict[str, bytes] = fields[1]
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "picked"),
    [
        (("near", "far"), ("near", "far"), "near"),
        (("near", "far"), ("far",), "far"),
        (("far", "near"), ("near", "far"), "far"),
        (("near",), ("near", "far"), "near"),
    ],
)
def test_a_peer_gets_the_first_that_both_have(
    hub: Hub, ours: tuple[str, ...], theirs: tuple[str, ...], picked: str
) -> None:
    writer, target = Worker("writer", hub, *ours), Worker("target", hub, *theirs)
    peer = writer.transport.connect(target.metadata)
    assert peer.name.startswith(f"{picked}:target#")
    handle = writer.transport.post(peer, [Piece(0, 2, 1)], b"part")
    finished = [each for _ in range(3) for each in writer.transport.poll().finished]
    assert finished == [Finished(handle)]
    assert [each.payload for each in target.transport.poll().notifications] == [b"part"]
    assert target.pool.raw == b"t" * 128 + b"w" * 64 + b"t" * 64
    writer.transport.close()
    target.transport.close()


def test_a_peer_that_the_first_cannot_reach_gets_the_second(hub: Hub) -> None:
    writer, target = Worker("writer", hub, "near", "far"), Worker("target", hub, "near", "far")
    members = members_of(target.metadata)
    near = msgspec.msgpack.decode(members["near"])
    near[2] = "another boot"
    far = msgspec.msgpack.encode(["by-peer-1", {**members, "near": msgspec.msgpack.encode(near)}])
    assert writer.transport.connect(far).name.startswith("far:")
    writer.transport.close()
    target.transport.close()


def test_handles_of_two_members_are_never_confused(hub: Hub) -> None:
    writer = Worker("writer", hub, "near", "far")
    near, far = Worker("near", hub, "near"), Worker("far", hub, "far")
    to_near, to_far = writer.transport.connect(near.metadata), writer.transport.connect(far.metadata)
    handles = [writer.transport.post(peer, [], b"part") for peer in (to_near, to_far, to_near)]
    assert len(set(handles)) == 3
    finished = [each.handle for _ in range(3) for each in writer.transport.poll().finished]
    assert sorted(finished, key=handles.index) == handles
    for worker in (writer, near, far):
        worker.transport.close()


def test_without_a_common_member_every_reason_is_named(hub: Hub) -> None:
    writer, target = Worker("writer", hub, "near"), Worker("target", hub, "far")
    with pytest.raises(TransferFailed, match="near: the peer has none"):
        writer.transport.connect(target.metadata)
    writer.transport.close()
    target.transport.close()


def test_a_member_that_cannot_register_is_left_out_unless_it_is_the_last(hub: Hub) -> None:
    worker = Worker("worker", hub, "far")
    on_gpu = Region(worker.region.address, BLOCKS, BLOCK_BYTES, "cuda")
    near, far = CudaIpcTransport("mixed", HostMemory()), NixlTransport("mixed")
    with pytest.raises(StartupError, match="the pool is elsewhere"):
        ByPeerTransport({"near": near}).register(on_gpu)
    near = CudaIpcTransport("mixed", HostMemory())
    loopback = LoopbackTransport(hub, "mixed")
    mixed = ByPeerTransport({"loopback": loopback, "far": far, "near": near})
    loopback.register(worker.region)  # a second registration is refused
    assert set(members_of(mixed.register(worker.region))) == {"far", "near"}
    mixed.close()
    worker.transport.close()


def test_nixl_refuses_to_join_a_gpu_to_host_memory(hub: Hub) -> None:
    worker = Worker("worker", hub, "far")
    ours, theirs = NixlTransport("ours"), NixlTransport("theirs")
    ours.register(worker.region)
    fields = msgspec.msgpack.decode(theirs.register(worker.region))
    fields[fields.index("cpu")] = "cuda"
    with pytest.raises(TransferFailed, match="the peer's pool is on cuda and ours on cpu"):
        ours.connect(msgspec.msgpack.encode(fields))
    for each in (ours, theirs, worker.transport):
        each.close()
