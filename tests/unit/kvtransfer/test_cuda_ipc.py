"""What is `CudaIpcTransport`'s own beyond the rules of every transport: its mappings and its mailbox.

Two transports of this process over host memory, so that a test holds and breaks copies at will.
"""

from __future__ import annotations

import ctypes
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import create
from paceline.kvtransfer.transports.cuda_ipc import CudaIpcTransport, block_pairs
from paceline.kvtransfer.transports.mailbox import MAX_PAYLOAD_BYTES, Address, Mailbox, Sent
from paceline.kvtransfer.transports.transport import Finished, Handle, Notification, Peer, Piece, Polled
from paceline.testing.host_memory import HostMemory

BLOCKS, BLOCK_BYTES = 8, 64


@dataclass
class Side:
    """A transport with its pool."""

    name: str
    memory: HostMemory = field(default_factory=HostMemory)

    def __post_init__(self) -> None:
        self.transport = CudaIpcTransport(self.name, self.memory)
        self.pool = ctypes.create_string_buffer(BLOCKS * BLOCK_BYTES)
        self.metadata = self.transport.register(Region(ctypes.addressof(self.pool), BLOCKS, BLOCK_BYTES))

    def block(self, index: int) -> bytes:
        return self.pool.raw[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


@dataclass
class Sides:
    writer: Side
    target: Side
    peer: Peer

    def post(self, *blocks: int, payload: bytes | None = None) -> Handle:
        return self.writer.transport.post(self.peer, [Piece(block, block, 1) for block in blocks], payload)

    def finished(self, polls: int = 3) -> list[Finished]:
        """What ends in some polls: a copy moves in the second."""
        return [each for _ in range(polls) for each in self.writer.transport.poll().finished]


@pytest.fixture
def sides() -> Iterator[Sides]:
    writer, target = Side("writer"), Side("target")
    yield Sides(writer, target, writer.transport.connect(target.metadata))
    writer.transport.close()
    target.transport.close()


def changed(metadata: bytes, place: int, value: object) -> bytes:
    """Metadata with one of its fields replaced; 0 is its tag."""
    fields = msgspec.msgpack.decode(metadata)
    fields[place] = value
    return msgspec.msgpack.encode(fields)


def test_the_notification_waits_for_the_copy(sides: Sides) -> None:
    sides.writer.pool.raw = b"k" * len(sides.writer.pool)
    sides.writer.memory.hold = True
    handle = sides.post(3, payload=b"part")
    assert sides.finished() == []
    assert sides.target.transport.poll() == Polled()
    sides.writer.memory.hold = False
    assert sides.finished() == [Finished(handle)]
    assert [each.payload for each in sides.target.transport.poll().notifications] == [b"part"]
    assert [sides.target.block(index) for index in (2, 3)] == [bytes(BLOCK_BYTES), b"k" * BLOCK_BYTES]


def test_a_copy_that_fails_sends_no_notification(sides: Sides) -> None:
    sides.writer.memory.fail_next = 1
    sides.post(0, payload=b"never")
    good = sides.post(1, payload=b"after it")
    failed, done = sides.finished()
    assert failed.error is not None
    assert "as the test wants it" in failed.error
    assert done == Finished(good)
    assert [each.payload for each in sides.target.transport.poll().notifications] == [b"after it"]


def test_a_released_pool_stays_mapped_until_its_last_copy_ends(sides: Sides) -> None:
    sides.writer.memory.hold = True
    handle = sides.post(0, payload=b"last")
    sides.writer.transport.release(sides.peer)
    assert (sides.finished(), sides.writer.memory.mapped) == ([], 1)
    sides.writer.memory.hold = False
    assert sides.finished() == [Finished(handle)]
    assert sides.writer.memory.mapped == 0
    assert [each.payload for each in sides.target.transport.poll().notifications] == [b"last"]


def test_an_idle_released_pool_is_unmapped_at_once(sides: Sides) -> None:
    sides.writer.transport.release(sides.peer)
    assert sides.writer.memory.mapped == 0


def test_a_pool_whose_owner_is_gone_is_unmapped_when_the_copies_into_it_end(sides: Sides) -> None:
    sides.writer.memory.hold = True
    handle = sides.post(0, payload=b"too late")
    sides.target.transport.close()
    assert (sides.finished(), sides.writer.memory.mapped) == ([], 1)
    with pytest.raises(TransferFailed, match="is lost"):
        sides.post(1)
    sides.writer.memory.hold = False
    [ended] = sides.finished()
    assert ended == Finished(handle, f"a write to {sides.peer.name} failed: it is gone")
    assert sides.writer.memory.mapped == 0
    with pytest.raises(TransferFailed, match="is lost"):
        sides.post(1)


def test_a_pool_whose_owner_is_gone_is_unmapped_where_nothing_is_under_way(sides: Sides) -> None:
    sides.target.transport.close()
    sides.writer.transport.poll()
    assert sides.writer.memory.mapped == 0


def test_closing_unmaps_every_pool(sides: Sides) -> None:
    sides.writer.transport.close()
    assert sides.writer.memory.mapped == 0
    assert sides.writer.transport.poll() == Polled()
    with pytest.raises(TransferFailed, match="closed"):
        sides.post(0)


def test_a_target_that_does_not_read_delays_notifications_and_loses_none(sides: Sides) -> None:
    payloads = [b"%d" % number + b" " * 1000 for number in range(2000)]
    handles = [sides.post(payload=payload) for payload in payloads]
    early = sides.finished()
    assert 0 < len(early) < len(handles)  # the socket is full
    arrived: list[bytes] = []
    while len(early) < len(handles):
        arrived += [each.payload for each in sides.target.transport.poll().notifications]
        early += sides.finished(1)
    arrived += [each.payload for each in sides.target.transport.poll().notifications]
    assert sorted(arrived) == sorted(payloads)
    assert [each.error for each in early] == [None] * len(handles)


def test_a_notification_over_the_limit_is_refused_and_one_at_the_limit_arrives(sides: Sides) -> None:
    with pytest.raises(TransferFailed, match=f"{MAX_PAYLOAD_BYTES + 1} bytes is over the limit of {MAX_PAYLOAD_BYTES}"):
        sides.post(payload=b"x" * (MAX_PAYLOAD_BYTES + 1))
    sides.post(payload=b"x" * MAX_PAYLOAD_BYTES)
    assert [each.error for each in sides.finished()] == [None]
    assert [len(each.payload) for each in sides.target.transport.poll().notifications] == [MAX_PAYLOAD_BYTES]


def test_an_empty_notification_is_one(sides: Sides) -> None:
    sides.post(payload=b"")
    assert [each.error for each in sides.finished()] == [None]
    assert [each.payload for each in sides.target.transport.poll().notifications] == [b""]


@pytest.mark.parametrize("event", ["a notification", "a death"])
def test_a_sleeping_loop_is_woken_by(sides: Sides, event: str) -> None:
    side = sides.target if event == "a notification" else sides.writer
    side.transport.poll()
    descriptor = side.transport.wake_descriptor
    assert descriptor is not None
    assert select.select([descriptor], [], [], 0)[0] == []
    if event == "a notification":
        sides.post(payload=b"wake")
        sides.finished()
    else:
        sides.target.transport.close()
    assert select.select([descriptor], [], [], 30)[0] == [descriptor]
    side.transport.poll()
    assert select.select([descriptor], [], [], 0)[0] == []


def test_a_peer_on_another_host_is_refused(sides: Sides) -> None:
    sides.writer.transport.release(sides.peer)
    with pytest.raises(TransferFailed, match="on another host"):
        sides.writer.transport.connect(changed(sides.target.metadata, 2, "another boot"))


def test_a_caller_without_the_secret_is_not_believed(sides: Sides) -> None:
    sides.target.transport.poll()
    sides.writer.transport.release(sides.peer)
    liar = sides.writer.transport.connect(changed(sides.target.metadata, 7, b"?" * 16))
    sides.writer.transport.post(liar, [], b"a lie")
    sides.finished()
    assert sides.target.transport.poll() == Polled()
    sides.writer.transport.poll()
    with pytest.raises(TransferFailed, match="is lost"):
        sides.writer.transport.post(liar, [], b"a lie")


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    mailbox, caller = Mailbox(), Mailbox()
    silent = []
    for _ in range(200):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(f"\0{mailbox.address.name}")
        mailbox.receive()
    line = caller.call(mailbox.address, "caller")
    assert line.send(b"heard") is Sent.YES
    assert [(each.sender, each.payload) for each in mailbox.receive()] == [("caller", b"heard")]
    for each in (*silent, mailbox, caller):
        each.close()


def test_nobody_at_an_address_is_told_apart_from_a_full_one() -> None:
    caller = Mailbox()
    with pytest.raises(TransferFailed, match="does not answer"):
        caller.call(Address("paceline-nobody", b""), "caller")
    caller.close()


def test_pieces_become_pairs_of_blocks_in_order() -> None:
    pairs = block_pairs([Piece(5, 0, 3), Piece(1, 7, 1), Piece(2, 20, 2)])
    assert pairs.dtype == np.int32
    assert pairs.tolist() == [[5, 0], [6, 1], [7, 2], [1, 7], [2, 20], [3, 21]]


def test_without_a_gpu_it_says_so_and_auto_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartupError, match="transport cuda_ipc: torch sees no CUDA device"):
        create("cuda_ipc", "worker", device="cuda")
    chosen = create("auto", "worker", device="cuda")
    assert (chosen.name, chosen.why) == ("nixl", "no cuda_ipc: torch sees no CUDA device")
    chosen.transport.close()


def test_a_notification_names_its_sender(sides: Sides) -> None:
    sides.post(payload=b"who")
    sides.finished()
    [notification] = sides.target.transport.poll().notifications
    assert isinstance(notification, Notification)
    assert notification.sender.startswith("writer#")
