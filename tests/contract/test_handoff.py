"""A hand-off by an agent of this process into the pool of another process, over NIXL."""

import ctypes
import time
from collections.abc import Iterator

import pytest

from paceline.errors import TransferFailed
from paceline.kvtransfer.agent import TransferAgent
from paceline.kvtransfer.layout import Fingerprint, KvLayout
from paceline.kvtransfer.outgoing import Outgoing, OutgoingState
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transfer import PartNotification, decode
from paceline.kvtransfer.transports import create
from paceline.testing.transport_end import LIVENESS_S, ProcessEnd, pattern
from paceline.types import ReservationId, WorkerKey

GROUP = KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="float32")
PRINT = Fingerprint.of(GROUP, model="m", weights_digest="d")
BLOCKS = 24
SEED = 9
P, D = WorkerKey("prefill-0", 1), WorkerKey("decode-0", 4)
R = ReservationId("r-1")


@pytest.fixture
def target() -> Iterator[ProcessEnd]:
    end = ProcessEnd("nixl", str(D), BLOCKS, GROUP.block_bytes, {})
    yield end
    end.close()


@pytest.fixture
def agent(target: ProcessEnd) -> Iterator[TransferAgent]:
    contents = b"".join(pattern(SEED, block, GROUP.block_bytes) for block in range(BLOCKS))
    memory = ctypes.create_string_buffer(contents, len(contents))
    region = Region(ctypes.addressof(memory), BLOCKS, GROUP.block_bytes)
    made = TransferAgent(create("nixl", str(P)).transport, P, region, PRINT)
    made.connect_peer(D, target.call("metadata"), PRINT)
    yield made
    made.close()


def poll_until_terminal(agent: TransferAgent, outgoing: Outgoing) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not outgoing.terminal:
        agent.poll()
        assert time.monotonic() < deadline, outgoing
        time.sleep(0.0002)
    agent.poll()


def received(target: ProcessEnd, count: int) -> list[PartNotification]:
    deadline = time.monotonic() + LIVENESS_S
    while len(payloads := [payload for payload, _ in target.call("notifications")]) < count:
        assert time.monotonic() < deadline, payloads
    return [part for payload in payloads if (part := decode(payload)) is not None]


def test_a_prompt_is_handed_over_in_parts_and_its_last_part_lands_last(
    agent: TransferAgent, target: ProcessEnd
) -> None:
    outgoing = agent.outgoing(D, R, 1)
    outgoing.write_part([0, 1, 2], [7, 8, 12])
    outgoing.write_part([], [])
    outgoing.write_part([9, 3], [0, 23])
    outgoing.finish([5], [4], [42])
    poll_until_terminal(agent, outgoing)
    parts = received(target, 4)
    assert [part.last for part in parts] == [False, False, False, True]
    assert {part.part for part in parts} == set(range(4))
    assert (parts[-1].total_parts, parts[-1].first_tokens) == (4, (42,))
    assert {(part.writer, part.target_epoch, part.reservation_id, part.attempt) for part in parts} == {(P, 4, R, 1)}
    for source, block in {0: 7, 1: 8, 2: 12, 9: 0, 3: 23, 5: 4}.items():
        assert target.call("read", block) == pattern(SEED, source, GROUP.block_bytes)
    assert outgoing.state is OutgoingState.DONE
    assert not agent.busy
    assert agent.stats.written.num_bytes == 6 * GROUP.block_bytes


def test_a_pair_is_measured_through_blocks_that_were_granted(agent: TransferAgent, target: ProcessEnd) -> None:
    outgoing = agent.outgoing(D, R, 1)
    assert agent.measure(outgoing, [0, 1], [2, 3], timeout_s=LIVENESS_S) > 0
    outgoing.finish([], [], [1])
    poll_until_terminal(agent, outgoing)
    assert [part.last for part in received(target, 1)] == [True]
    assert target.call("read", 3) == pattern(SEED, 1, GROUP.block_bytes)
    assert target.call("read", 4) == bytes(GROUP.block_bytes)


def test_measuring_a_target_that_does_not_poll_gives_up_and_its_write_still_ends(
    agent: TransferAgent, target: ProcessEnd
) -> None:
    target.call("set_polling", False)
    outgoing = agent.outgoing(D, R, 1)
    with pytest.raises(TransferFailed, match="is the peer polling"):
        agent.measure(outgoing, [0], [0], timeout_s=0.2)
    assert agent.busy
    target.call("set_polling", True)
    poll_until_terminal(agent, outgoing)
    assert not agent.busy


def test_a_hand_off_to_a_dead_worker_fails_and_the_agent_lives(agent: TransferAgent, target: ProcessEnd) -> None:
    target.kill()
    outgoing = agent.outgoing(D, R, 1)
    outgoing.write_part([0], [0])
    outgoing.finish([1], [1], [1])
    poll_until_terminal(agent, outgoing)
    assert outgoing.state is OutgoingState.FAILED
    assert D.worker_id in (outgoing.error or "")
    agent.drop_peer(D)
    assert agent.peers == frozenset()
