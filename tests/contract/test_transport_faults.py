"""What every `Transport` promises when a peer is released, dies, is stopped or starts again."""

from collections.abc import Iterator

import pytest

from paceline.errors import TransferFailed
from paceline.testing.transport_end import ProcessEnd
from paceline.testing.transport_pair import ALL, IPC_KINDS, KINDS, PROCESS_KINDS, TARGET_SEED, WRITER_SEED, Bench, Pair


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


def test_a_released_peer_refuses_posts_while_what_was_under_way_ends(own_pair: Pair) -> None:
    pair = own_pair
    handles = [pair.post([block], [block], b"under way %d" % block) for block in range(8)]
    pair.writer.call("release", pair.peer)
    with pytest.raises(TransferFailed, match="released"):
        pair.post([9], [9], b"too late")
    assert set(pair.wait_finished(*handles).values()) == {None}
    pair.assert_target_holds({block: block for block in range(8)})
    with pytest.raises(TransferFailed, match="released"):
        pair.post([9], [9], b"too late")
    pair.writer.call("release", pair.peer)


def test_a_released_peer_that_lives_can_be_connected_again(own_pair: Pair) -> None:
    pair = own_pair
    first = pair.post([0], [1], b"before")
    assert pair.wait_finished(first) == {first: None}
    pair.writer.call("release", pair.peer)
    pair.peer = pair.writer.call("connect", pair.target.call("metadata"))
    second = pair.post([2], [3], b"after")
    assert pair.wait_finished(second) == {second: None}
    assert second != first
    pair.wait_notified(b"before", b"after")
    pair.assert_target_holds({1: 0, 3: 2})


@pytest.mark.parametrize("own_pair", ["loopback", "nixl", "nixl-tcp"], indirect=True)
def test_writes_to_a_dead_peer_end_failed_and_its_next_life_is_served(own_pair: Pair) -> None:
    pair = own_pair
    first = pair.post([0], [0], b"first")
    assert pair.wait_finished(first) == {first: None}
    pair.target.call("set_polling", False)  # so that what follows is still under way when the target dies
    under_way = pair.post(list(range(40)), list(range(40)), b"under way")
    pair.bench.kill(pair.target)
    pair.target = pair.bench.end("target")  # the same worker, started again
    pair.target.call("fill", ALL, TARGET_SEED)
    late = pair.post([1], [1], b"late")
    errors = pair.wait_finished(under_way, late)
    assert all(error is not None for error in errors.values()), errors
    pair.writer.call("release", pair.peer)
    pair.peer = pair.writer.call("connect", pair.target.call("metadata"))
    again = pair.post([5], [6], b"again")
    assert pair.wait_finished(again) == {again: None}
    pair.wait_notified(b"again")
    pair.assert_target_holds({6: 5})


@pytest.mark.parametrize("own_pair", [kind for kind in PROCESS_KINDS if not kind.startswith("nixl")], indirect=True)
def test_posts_to_a_dead_peer_are_refused_or_end_failed_and_its_next_life_is_served(own_pair: Pair) -> None:
    """Where its memory is mapped, a write needs nothing of the target, and may have arrived before its death."""
    pair = own_pair
    pair.target.call("set_polling", False)
    under_way = pair.post(list(range(40)), list(range(40)), b"under way")
    pair.bench.kill(pair.target)
    pair.wait_finished(under_way)
    with pytest.raises(TransferFailed, match=r"gone|lost"):
        late = pair.post([1], [1], b"late")  # its loss may not be known yet
        raise TransferFailed(str(pair.wait_finished(late)[late]))
    pair.target = pair.bench.end("target")  # the same worker, started again
    pair.target.call("fill", ALL, TARGET_SEED)
    pair.writer.call("release", pair.peer)
    pair.peer = pair.writer.call("connect", pair.target.call("metadata"))
    again = pair.post([5], [6], b"again")
    assert pair.wait_finished(again) == {again: None}
    pair.wait_notified(b"again")
    pair.assert_target_holds({6: 5})


@pytest.mark.parametrize("own_pair", IPC_KINDS, indirect=True)
def test_a_dead_peer_is_not_connected(own_pair: Pair) -> None:
    pair = own_pair
    other = pair.bench.end("target")
    metadata = other.call("metadata")
    pair.bench.kill(other)
    with pytest.raises(TransferFailed, match="does not answer"):
        pair.writer.call("connect", metadata)


@pytest.mark.parametrize("own_pair", PROCESS_KINDS, indirect=True)
def test_a_target_outlives_its_writer_and_takes_the_next_one(own_pair: Pair) -> None:
    pair = own_pair
    first = pair.post([0], [0], b"first")
    assert pair.wait_finished(first) == {first: None}
    pair.target.call("set_polling", False)
    pair.post(list(range(8, 40)), list(range(8, 40)), b"cut off")
    pair.bench.kill(pair.writer)
    at_death = pair.target.call("checksums", ALL)
    pair.target.call("set_polling", True)
    pair.writer = pair.bench.end("writer")
    pair.writer.call("fill", ALL, WRITER_SEED)
    pair.peer = pair.writer.call("connect", pair.target.call("metadata"))
    again = pair.post([1], [1], b"again")
    assert pair.wait_finished(again) == {again: None}
    pair.wait_notified(b"again")
    after = pair.target.call("checksums", ALL)
    changed = {block for block in ALL if after[block] != at_death[block]} - {1}
    assert changed <= set(range(8, 40))
    if pair.bench.kind == "nixl-tcp":
        # The writer was dead and reaped, and yet its bytes came out of the kernel's buffers when the target polled
        # again: why `TransferAgent.drain` stands between the proof of a death and the reuse of the blocks.
        assert changed
        assert b"cut off" not in pair.arrived()


@pytest.mark.parametrize(
    ("own_pair", "posted"),
    [("loopback", True), *((kind, False) for kind in PROCESS_KINDS), ("nixl-tcp", True)],
    indirect=["own_pair"],
)
def test_a_stopped_writer_that_goes_on_spoils_nothing_but_its_quarantined_blocks(own_pair: Pair, posted: bool) -> None:
    """The writer stops with a write armed: posted, or decided and not yet posted. The target gives the reservation up
    and serves others meanwhile; then the writer goes on.

    The last assertion is the reason for the quarantine: blocks that were given up *are* overwritten, long after. Had
    they been free by then, another request would have held them.
    """
    pair, hub = own_pair, own_pair.bench.hub
    warm = pair.post([0], [0], b"warm")
    assert pair.wait_finished(warm) == {warm: None}
    granted = list(range(8, 40))
    call = ("post", pair.peer, [(8, 8, len(granted))], b"armed")

    pair.target.call("set_polling", False)
    if isinstance(pair.writer, ProcessEnd):
        if posted:
            armed = pair.writer.call(*call)
            assert armed not in pair.writer.call("finished"), (
                "the write must be under way for this test to mean anything"
            )
            pair.writer.stop()
        else:
            pair.writer.stop()
            pair.writer.begin(*call)
    else:
        hub.hold = True
        armed = pair.writer.call(*call)
    pair.target.call("set_polling", True)

    quarantined = set(granted)
    others = sorted(set(ALL) - quarantined)
    pair.target.call("fill", others, TARGET_SEED + 1)  # other requests' KV
    before = pair.target.call("checksums", ALL)

    if isinstance(pair.writer, ProcessEnd):
        pair.writer.resume()
        if not posted:
            armed = pair.writer.result()
    hub.hold = False
    pair.wait_finished(armed)

    after = pair.target.call("checksums", ALL)
    assert [block for block in others if after[block] != before[block]] == []
    assert {block for block in quarantined if after[block] != before[block]} != set()
