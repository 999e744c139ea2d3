"""What every `Transport` promises, tried on each: contents byte by byte, liveness bounded, speed never.

`nixl-one-process` are two agents in this process, `nixl` are two processes over whatever UCX picks (here: shared
memory, where a post blocks until done), `nixl-tcp` are two processes whose writes really are under way for a while.
`ipc-on-host` is the `cuda_ipc` transport over host memory (`HostMemory`), and `by-peer` picks it before `nixl`. Where
there are GPUs, `cuda_ipc` joins the first to the last, `cuda_ipc-one-gpu` two processes on one, and `cuda-auto` picks.
"""

from collections.abc import Iterator

import pytest

from paceline.errors import ConfigError, FingerprintMismatch, TransferFailed
from paceline.kvtransfer.transports import create
from paceline.testing.transport_end import pattern, wait_until
from paceline.testing.transport_pair import ALL, BLOCK_BYTES, BLOCKS, KINDS, TARGET_SEED, Bench, Pair


@pytest.fixture(scope="module", params=KINDS)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    bench = Bench(request.param)
    try:
        yield Pair.make(bench)
    finally:
        bench.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """A pair for tests that leave it whole."""
    shared_pair.refill()
    return shared_pair


@pytest.fixture(params=KINDS)
def own_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair for tests that break it."""
    bench = Bench(request.param)
    try:
        made = Pair.make(bench)
        made.refill()
        yield made
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([5], [9]),
        ([0, 2, 4, 6, 47], [1, 47, 3, 0, 21]),
        (list(range(10, 30)), list(range(3, 23))),
        ([1, 2, 3, 7, 8, 20], [11, 12, 13, 17, 18, 19]),
        (list(ALL), list(reversed(ALL))),
    ],
    ids=["one", "scattered", "run", "merged", "all"],
)
def test_blocks_arrive_byte_for_byte_and_no_other_block_changes(
    pair: Pair, source: list[int], target: list[int]
) -> None:
    handle = pair.post(source, target, b"arrived")
    assert pair.wait_finished(handle) == {handle: None}
    pair.assert_target_holds(dict(zip(target, source, strict=True)))


def test_a_notification_is_visible_only_after_the_data(pair: Pair) -> None:
    pair.target.call("watch", ALL)
    pair.post(list(ALL), list(ALL), b"after the data")
    pair.wait_notified(b"after the data")
    at_arrival = dict(pair.target.call("notifications"))[b"after the data"]
    assert at_arrival == pair.writer.call("checksums", ALL)


def test_posts_at_once_end_once_each_and_notify_once_each_in_any_order(pair: Pair) -> None:
    payloads = [b"concurrent %d" % block for block in ALL]
    handles = [pair.post([block], [block], payload) for block, payload in zip(ALL, payloads, strict=True)]
    assert len(set(handles)) == BLOCKS
    assert set(pair.wait_finished(*handles).values()) == {None}
    pair.wait_notified(*payloads)
    assert sorted(each for each in pair.arrived() if each.startswith(b"concurrent")) == sorted(payloads)
    pair.assert_target_holds({block: block for block in ALL})


def test_a_post_without_blocks_notifies_and_changes_nothing(pair: Pair) -> None:
    handle = pair.post([], [], b"no blocks")
    assert pair.wait_finished(handle) == {handle: None}
    pair.wait_notified(b"no blocks")
    pair.assert_target_holds({})


def test_a_post_without_notification_writes_in_silence(pair: Pair) -> None:
    before = len(pair.arrived())
    handle = pair.post([3], [4], None)
    assert pair.wait_finished(handle) == {handle: None}
    fence = b"fence %d" % handle
    pair.post([], [], fence)
    pair.wait_notified(fence)
    assert pair.arrived()[before:] == [fence]
    pair.assert_target_holds({4: 3})


def test_a_post_of_nothing_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="nothing"):
        pair.post([], [], None)


@pytest.mark.parametrize(
    "piece", [(0, BLOCKS, 1), (0, BLOCKS - 1, 2), (BLOCKS - 1, 0, 2), (-1, 0, 1), (0, -1, 1), (0, 0, 0)]
)
def test_blocks_outside_either_pool_are_refused_and_nothing_is_posted(pair: Pair, piece: tuple[int, int, int]) -> None:
    with pytest.raises(TransferFailed, match="outside"):
        pair.writer.call("post", pair.peer, [(1, 1, 1), piece], b"stray")
    handle = pair.post([2], [2], b"in range")
    assert pair.wait_finished(handle) == {handle: None}
    pair.assert_target_holds({2: 2})
    assert b"stray" not in pair.arrived()


def test_garbage_for_metadata_is_refused(pair: Pair) -> None:
    for garbage in (b"", b"\x00" * 40, b"\xff\xfe", pair.target.call("metadata")[:-9]):
        with pytest.raises(TransferFailed, match="metadata"):
            pair.writer.call("connect", garbage)


def test_a_peer_is_connected_once(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="already"):
        pair.writer.call("connect", pair.target.call("metadata"))
    handle = pair.post([7], [8], b"still connected")
    assert pair.wait_finished(handle) == {handle: None}


def test_no_repr_shows_what_grants_writes(pair: Pair) -> None:
    metadata: bytes = pair.target.call("metadata")
    shown = pair.target.call("describe") + pair.writer.call("describe")
    assert str(metadata) not in shown
    assert len(shown) < 400


def test_an_idle_end_takes_no_cpu_time(pair: Pair) -> None:
    # A progress thread, as NIXL starts by default, would take the whole second.
    assert pair.target.call("cpu_seconds_asleep", 1.0) < 0.5


def test_a_target_writes_to_its_writer_at_the_same_time(own_pair: Pair) -> None:
    pair = own_pair
    back = pair.target.call("connect", pair.writer.call("metadata"))
    there = pair.post(list(range(0, 20)), list(range(0, 20)), b"there")
    pair.target.call("post", back, [(20, 20, 28)], b"and back")
    assert pair.wait_finished(there) == {there: None}
    wait_until(
        lambda: b"and back" in [payload for payload, _ in pair.writer.call("notifications")],
        "the arrival of the way back",
        pair.writer,
        pair.target,
    )
    pair.assert_target_holds({block: block for block in range(20)})
    assert all(
        pair.writer.call("read", block) == pattern(TARGET_SEED, block, BLOCK_BYTES) for block in range(20, BLOCKS)
    )


@pytest.mark.parametrize("own_pair", ["loopback", "nixl-one-process", "ipc-on-host"], indirect=True)
def test_a_peer_with_blocks_of_another_size_is_refused_with_both_sizes_named(own_pair: Pair) -> None:
    other = own_pair.bench.end("other", block_bytes=BLOCK_BYTES // 2)
    with pytest.raises(FingerprintMismatch, match=f"{BLOCK_BYTES} here, {BLOCK_BYTES // 2} at the peer"):
        own_pair.writer.call("connect", other.call("metadata"))


def test_an_unknown_transport_and_a_loopback_without_a_hub_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is none of auto, nixl, cuda_ipc, ucxx, loopback"):
        create("pigeon", "worker")
    with pytest.raises(ConfigError, match="loopback"):
        create("loopback", "worker")
    with pytest.raises(ConfigError, match="cuda_ipc moves KV between GPUs, and the pool is on cpu"):
        create("cuda_ipc", "worker")


def test_auto_says_what_it_picked_and_why() -> None:
    chosen = create("auto", "worker")
    assert chosen.name == "nixl"
    assert chosen.why
    chosen.transport.close()
