"""Hand-offs between agents over the loopback twin, whose hub delays, re-orders and breaks them at will."""

import ctypes
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import FingerprintMismatch, StaleEpoch, TransferFailed
from paceline.kvtransfer.agent import AgentEvents, TransferAgent
from paceline.kvtransfer.layout import Fingerprint
from paceline.kvtransfer.outgoing import Outgoing, OutgoingState
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transfer import PartNotification
from paceline.kvtransfer.transports.loopback import Hub, LoopbackTransport
from paceline.types import ReservationId, WorkerKey

BLOCKS, BLOCK_BYTES = 32, 64
PRINT = Fingerprint(
    format_version=1, model="m", weights_digest="d", dtype="float32", layers=1, kv_heads=1, head_dim=1, block_tokens=16
)
R = ReservationId("r-1")


class Clock:
    """Stands still, or goes on by `step` seconds at each look."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Worker:
    """An agent, its pool, and all that it reported."""

    def __init__(self, hub: Hub, worker_id: str, epoch: int, fill: int, clock: Callable[[], float]) -> None:
        self.memory = ctypes.create_string_buffer(bytes([fill]) * (BLOCKS * BLOCK_BYTES), BLOCKS * BLOCK_BYTES)
        self.transport = LoopbackTransport(hub, f"{worker_id}@{epoch}")
        region = Region(ctypes.addressof(self.memory), BLOCKS, BLOCK_BYTES)
        self.agent = TransferAgent(self.transport, WorkerKey(worker_id, epoch), region, PRINT, clock=clock)
        self.key = self.agent.worker
        self.parts: list[PartNotification] = []
        self.settled: list[Outgoing] = []
        self.terminal: list[Outgoing] = []
        self.num_bytes = 0

    def poll(self) -> AgentEvents:
        events = self.agent.poll()
        self.parts += events.parts
        self.settled += events.settled
        self.terminal += events.terminal
        self.num_bytes += events.bytes_written
        return events

    def blocks_holding(self, value: int) -> set[int]:
        raw = self.memory.raw
        return {
            b for b in range(BLOCKS) if raw[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES] == bytes([value]) * BLOCK_BYTES
        }


class Cluster:
    """One prefill and one decode worker, connected."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.clock = Clock()
        self.p = Worker(self.hub, "prefill-0", 1, 7, self.clock)
        self.d = Worker(self.hub, "decode-0", 1, 0, self.clock)
        self.connect(self.d)

    def connect(self, target: Worker) -> None:
        self.p.agent.connect_peer(target.key, target.agent.metadata(), PRINT)

    def run(self, turns: int = 20) -> None:
        for _ in range(turns):
            self.p.poll()
            self.d.poll()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_parts_land_and_the_last_says_how_many_there_were(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    assert cluster.p.agent.busy
    outgoing.write_part([0, 1], [4, 5])
    outgoing.write_part([2], [9])
    outgoing.finish([3], [11], [42])
    cluster.run()
    assert cluster.d.blocks_holding(7) == {4, 5, 9, 11}
    assert {part.part: part.num_blocks for part in cluster.d.parts} == {0: 2, 1: 1, 2: 1}
    last = cluster.d.parts[-1]
    assert (last.last, last.total_parts, last.first_tokens) == (True, 3, (42,))
    assert (last.writer, last.reservation_id, last.attempt) == (cluster.p.key, R, 1)
    assert (outgoing.state, outgoing.terminal, outgoing.error) == (OutgoingState.DONE, True, None)
    assert cluster.p.settled == cluster.p.terminal == [outgoing]
    assert not cluster.p.agent.busy


@given(
    delays=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    newest_first=st.booleans(),
    polls_between=st.integers(0, 3),
)
def test_the_last_part_arrives_after_all_others_in_any_order_of_handles(
    delays: Sequence[int], newest_first: bool, polls_between: int
) -> None:
    cluster = Cluster()
    cluster.hub.newest_first = newest_first
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    for index, delay in enumerate(delays):
        cluster.hub.delay_polls = delay
        outgoing.write_part([index], [index])
        cluster.run(polls_between)
    cluster.hub.delay_polls = 0
    outgoing.finish([], [], [1])
    cluster.run()
    assert [part.last for part in cluster.d.parts] == [False] * len(delays) + [True]
    assert outgoing.state is OutgoingState.DONE
    assert cluster.p.terminal == [outgoing]


def test_parts_without_blocks_notify_all_the_same(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.write_part([], [])
    outgoing.finish([], [], [3])
    cluster.run()
    assert [(part.part, part.num_blocks) for part in cluster.d.parts] == [(0, 0), (1, 0)]
    assert cluster.d.blocks_holding(7) == set()


def test_nothing_follows_the_last_part(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.finish([0], [0], [1])
    with pytest.raises(RuntimeError, match="finished"):
        outgoing.write_part([1], [1])
    with pytest.raises(RuntimeError, match="finished"):
        outgoing.finish([1], [1], [1])


def test_a_failed_write_fails_the_attempt_and_the_last_part_is_never_posted(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.hub.fail_next = 1
    outgoing.write_part([0], [0])
    outgoing.write_part([1], [1])
    outgoing.finish([2], [2], [1])
    cluster.run()
    assert outgoing.state is OutgoingState.FAILED
    assert outgoing.error is not None
    assert "failed" in outgoing.error
    assert not any(part.last for part in cluster.d.parts)
    assert cluster.p.terminal == [outgoing]
    assert cluster.p.agent.stats.failed == 1
    outgoing_again = cluster.p.agent.outgoing(cluster.d.key, R, 2)
    outgoing_again.finish([2], [2], [1])
    cluster.run()
    assert outgoing_again.state is OutgoingState.DONE


def test_an_aborted_attempt_is_terminal_only_when_its_writes_have_ended(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.hub.hold = True
    outgoing.write_part([0], [0])
    outgoing.abort()
    outgoing.write_part([1], [1])
    outgoing.finish([2], [2], [1])
    cluster.run()
    assert (outgoing.state, outgoing.terminal) == (OutgoingState.FAILED, False)
    assert (cluster.p.settled, cluster.p.terminal) == ([outgoing], [])
    assert cluster.p.agent.busy
    cluster.hub.hold = False
    cluster.run()
    assert (cluster.p.settled, cluster.p.terminal) == ([outgoing], [outgoing])
    assert cluster.d.blocks_holding(7) == {0}
    assert not cluster.p.agent.busy


def test_an_attempt_aborted_before_its_first_part_is_terminal_at_once_and_reported_once(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.abort("not needed")
    assert outgoing.terminal
    cluster.run()
    assert (cluster.p.settled, cluster.p.terminal, outgoing.error) == ([outgoing], [outgoing], "not needed")


def test_aborting_what_is_done_changes_nothing(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.finish([0], [0], [1])
    cluster.run()
    outgoing.abort()
    assert (outgoing.state, outgoing.error) == (OutgoingState.DONE, None)


def test_blocks_outside_the_targets_pool_fail_the_attempt_and_nothing_is_written(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.write_part([0], [BLOCKS])
    cluster.run()
    assert outgoing.state is OutgoingState.FAILED
    assert "outside the peer's pool" in (outgoing.error or "")
    assert cluster.d.blocks_holding(7) == set()


def test_a_dead_target_fails_the_attempt(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.hub.kill(cluster.d.transport)
    outgoing.write_part([0], [0])
    cluster.run()
    assert outgoing.state is OutgoingState.FAILED
    assert outgoing.terminal


def test_a_newer_epoch_replaces_the_older_and_the_older_never_comes_back(cluster: Cluster) -> None:
    old = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    reborn = Worker(cluster.hub, "decode-0", 2, 0, cluster.clock)
    cluster.connect(reborn)
    assert cluster.p.agent.peers == {reborn.key}
    assert old.state is OutgoingState.FAILED
    with pytest.raises(StaleEpoch, match="decode-0@1 has been replaced by epoch 2"):
        cluster.connect(cluster.d)
    cluster.p.agent.outgoing(reborn.key, R, 2).finish([1], [2], [1])
    cluster.run()
    reborn.poll()
    assert reborn.blocks_holding(7) == {2}


def test_a_dropped_peer_takes_no_more_attempts_and_can_be_connected_again(cluster: Cluster) -> None:
    cluster.p.agent.drop_peer(cluster.d.key)
    cluster.p.agent.drop_peer(cluster.d.key)
    with pytest.raises(TransferFailed, match="decode-0@1 is not connected"):
        cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.connect(cluster.d)
    cluster.connect(cluster.d)
    cluster.p.agent.outgoing(cluster.d.key, R, 1).finish([0], [0], [1])
    cluster.run()
    assert cluster.d.blocks_holding(7) == {0}


def test_a_mismatched_fingerprint_is_refused_before_anything_is_connected(cluster: Cluster) -> None:
    other = Worker(cluster.hub, "decode-1", 1, 0, cluster.clock)
    theirs = Fingerprint(**{**{f: getattr(PRINT, f) for f in PRINT.__struct_fields__}, "weights_digest": "e"})
    with pytest.raises(FingerprintMismatch, match="weights_digest differs: 'd' here, 'e' at the peer"):
        cluster.p.agent.connect_peer(other.key, other.agent.metadata(), theirs)
    assert other.key not in cluster.p.agent.peers


def test_a_notification_for_an_earlier_epoch_is_counted_and_ignored(cluster: Cluster) -> None:
    target = Worker(cluster.hub, "decode-1", 8, 0, cluster.clock)
    earlier = WorkerKey("decode-1", 7)
    cluster.p.agent.connect_peer(earlier, target.agent.metadata(), PRINT)
    cluster.p.agent.outgoing(earlier, R, 1).finish([], [], [1])
    cluster.run()
    target.poll()
    assert (target.agent.stats.stale, target.agent.stats.parts_received, target.parts) == (1, 0, [])


def test_garbage_for_a_notification_is_counted_and_ignored(cluster: Cluster) -> None:
    stranger = LoopbackTransport(cluster.hub, "stranger")
    memory = ctypes.create_string_buffer(BLOCK_BYTES)
    stranger.register(Region(ctypes.addressof(memory), 1, BLOCK_BYTES))
    stranger.post(stranger.connect(cluster.d.agent.metadata()), [], b"\xc1 no message")
    stranger.poll()
    cluster.d.poll()
    assert (cluster.d.agent.stats.ignored, cluster.d.agent.stats.parts_received, cluster.d.parts) == (1, 0, [])


def test_a_drained_writer_is_reported_after_polling_for_the_settling_time(cluster: Cluster) -> None:
    agent = cluster.d.agent
    agent.drain((R, 1))
    assert agent.busy
    cluster.clock.now += 60.0  # a loop that was held up: nothing was read, so nothing is drained
    assert agent.poll().drained == ()
    cluster.clock.now += 0.9
    assert agent.poll().drained == ()
    cluster.clock.now += 0.2
    assert agent.poll().drained == ((R, 1),)
    assert agent.poll().drained == ()
    assert not agent.busy


def test_parts_without_blocks_are_not_counted(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    outgoing.write_part([0], [0])
    outgoing.write_part([], [])
    outgoing.finish([1], [1], [1])
    cluster.run()
    assert len(cluster.d.parts) == 3
    assert outgoing.stats.parts == 2


def test_time_without_a_write_under_way_is_not_counted(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.hub.delay_polls = 1
    outgoing.write_part([0], [0])
    cluster.clock.now += 0.25
    cluster.run()
    cluster.clock.now += 60.0  # the next chunk is computed
    outgoing.finish([1], [1], [1])
    cluster.clock.now += 0.5
    cluster.run()
    assert outgoing.stats.seconds == 0.75


def test_bytes_pieces_and_seconds_are_counted(cluster: Cluster) -> None:
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.hub.delay_polls = 1
    outgoing.write_part([0, 1, 5], [0, 1, 9])
    cluster.clock.now += 0.25
    outgoing.finish([6], [6], [1])
    cluster.run()
    stats = cluster.p.agent.stats.written
    assert (stats.parts, stats.pieces, stats.blocks, stats.num_bytes) == (2, 3, 4, 4 * BLOCK_BYTES)
    assert stats.seconds == outgoing.stats.seconds == 0.25
    assert cluster.p.num_bytes == 4 * BLOCK_BYTES
    assert (cluster.p.agent.stats.done, cluster.d.agent.stats.blocks_received) == (1, 4)


def test_measuring_writes_granted_blocks_and_loses_nobody_elses_news(cluster: Cluster) -> None:
    agent = cluster.p.agent
    cluster.d.agent.connect_peer(cluster.p.key, agent.metadata(), PRINT)
    cluster.d.agent.outgoing(cluster.p.key, ReservationId("other"), 1).finish([], [], [1])
    cluster.d.poll()
    outgoing = agent.outgoing(cluster.d.key, R, 1)
    cluster.clock.step = 0.001
    bandwidth = agent.measure(outgoing, [0, 1], [4, 5], repeats=2)
    assert 2 * BLOCK_BYTES / 0.01 < bandwidth <= 2 * BLOCK_BYTES / 0.001
    assert cluster.d.blocks_holding(7) == {4, 5}
    assert [part.reservation_id for part in agent.poll().parts] == ["other"]
    outgoing.abort("measured")
    assert outgoing.terminal
    cluster.run()
    assert cluster.d.parts == []


def test_measuring_a_target_that_never_answers_gives_up_and_stays_accountable(cluster: Cluster) -> None:
    cluster.hub.hold = True
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    cluster.clock.step = 0.001
    with pytest.raises(TransferFailed, match="took too long"):
        cluster.p.agent.measure(outgoing, [0], [0], timeout_s=0.05)
    assert (outgoing.state, outgoing.terminal) == (OutgoingState.FAILED, False)
    cluster.hub.hold = False
    cluster.run()
    assert outgoing.terminal


def test_measuring_a_broken_way_raises_what_broke_it(cluster: Cluster) -> None:
    cluster.hub.fail_next = 1
    outgoing = cluster.p.agent.outgoing(cluster.d.key, R, 1)
    with pytest.raises(TransferFailed, match="as the hub was told"):
        cluster.p.agent.measure(outgoing, [0], [0])


def test_no_repr_shows_metadata(cluster: Cluster) -> None:
    assert str(cluster.d.agent.metadata()) not in repr(cluster.d.agent)
