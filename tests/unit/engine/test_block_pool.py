"""The pool's books: promises kept, blocks counted once, runs preferred, releases that happen once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.block_pool import BlockLease, BlockPool, LeaseReleased, PoolExhausted, runs


def test_a_lease_takes_the_pool_from_free_to_used_and_back() -> None:
    pool = BlockPool(8)
    with pool.lease(3) as lease:
        assert (pool.free, pool.used, pool.committed, lease.blocks) == (5, 3, 3, [0, 1, 2])
    assert (pool.free, pool.committed, lease.released) == (8, 0, True)


def test_a_released_lease_cannot_be_released_again() -> None:
    lease = BlockPool(4).lease(2)
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.release()


def test_a_released_lease_cannot_grow_or_be_shared() -> None:
    pool = BlockPool(4)
    lease = pool.lease(2, promise=1)
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.extend(1)
    with pytest.raises(LeaseReleased):
        lease.share()
    assert (pool.free, pool.committed) == (4, 0)


def test_a_promise_is_refused_to_others_and_kept_for_its_holder() -> None:
    pool = BlockPool(8)
    lease = pool.lease(2, promise=4)
    with pytest.raises(PoolExhausted, match=r"3 KV blocks were asked for and 2"):
        pool.lease(3)
    other = pool.lease(2)
    lease.grow_to(6)
    assert (len(lease.blocks), lease.promised, pool.headroom, pool.free) == (6, 0, 0, 0)
    with pytest.raises(PoolExhausted):
        lease.extend(1)
    other.release()
    lease.extend(1)
    assert (len(lease.blocks), pool.committed) == (7, 7)


def test_an_unused_promise_returns_with_the_lease() -> None:
    pool = BlockPool(8)
    pool.lease(1, promise=7).release()
    assert pool.headroom == 8


def test_a_refused_lease_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.lease(1, promise=1)
    with pytest.raises(PoolExhausted):
        pool.lease(1, promise=2)
    assert (pool.free, pool.committed) == (3, 2)


def test_a_shared_block_is_free_only_when_both_leases_are_released() -> None:
    pool = BlockPool(4)
    first = pool.lease(3)
    second = first.share(2)
    assert (second.blocks, pool.refs(0), pool.refs(2), pool.used) == ([0, 1], 2, 1, 3)
    first.release()
    assert pool.used == 2
    second.release()
    assert pool.free == 4


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(4)
    held = pool.lease(1)
    with pytest.raises(ValueError, match="block 1 is free"):
        pool.share([0, 1])
    assert pool.refs(0) == 1
    held.release()
    assert pool.free == 4


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = BlockPool(20)
    leases = [pool.lease(count) for count in (4, 1, 2, 1, 6, 1, 5)]
    for index in (0, 2, 4):  # free runs of 4 at 0, 2 at 5, 6 at 8
        leases[index].release()
    assert pool.lease(2).blocks == [5, 6]
    assert pool.lease(3).blocks == [0, 1, 2]


def test_a_lease_larger_than_any_run_is_made_of_the_largest_runs() -> None:
    pool = BlockPool(12)
    leases = [pool.lease(count) for count in (2, 1, 5, 1, 3)]
    for index in (0, 2, 4):
        leases[index].release()
    assert runs(pool.lease(8).blocks) == [(3, 5), (9, 3)]


def test_a_lease_grows_into_the_blocks_behind_it() -> None:
    pool = BlockPool(32)
    gap, lease = pool.lease(4), pool.lease(2)
    gap.release()
    lease.extend(3)
    assert lease.blocks == [4, 5, 6, 7, 8]


def test_freed_neighbours_merge_whatever_the_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)):
        pool = BlockPool(9)
        leases = [pool.lease(3) for _ in range(3)]
        for index in order:
            leases[index].release()
        assert pool.lease(9).blocks == list(range(9)), order


class PoolAgainstModel(RuleBasedStateMachine):
    """Any sequence of leases, growth, sharing and releases leaves the books equal to a naive count."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.leases: list[BlockLease] = []

    def headroom(self) -> int:
        held = {block for lease in self.leases for block in lease.blocks}
        return self.SIZE - len(held) - sum(lease.promised for lease in self.leases)

    @rule(count=st.integers(0, 10), promise=st.integers(0, 6))
    def lease(self, count: int, promise: int) -> None:
        if count + promise > self.headroom():
            with pytest.raises(PoolExhausted):
                self.pool.lease(count, promise=promise)
            return
        lease = self.pool.lease(count, promise=promise)
        assert len(lease.blocks) == count
        assert not set(lease.blocks) & {block for other in self.leases for block in other.blocks}
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 8))
    def extend(self, data: st.DataObject, count: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        before, promised = list(lease.blocks), lease.promised
        others = {block for other in self.leases for block in other.blocks}
        if count - promised > self.headroom():
            with pytest.raises(PoolExhausted):
                lease.extend(count)
            assert (lease.blocks, lease.promised) == (before, promised)
            return
        lease.extend(count)
        assert lease.blocks[: len(before)] == before
        assert len(lease.blocks) == len(before) + count
        assert not set(lease.blocks[len(before) :]) & others
        assert lease.promised == max(0, promised - count)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 10))
    def share(self, data: st.DataObject, count: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        shared = lease.share(count)
        assert shared.blocks == lease.blocks[:count]
        self.leases.append(shared)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.release()

    @invariant()
    def the_books_agree(self) -> None:
        counts = Counter(block for lease in self.leases for block in lease.blocks)
        assert [self.pool.refs(block) for block in range(self.SIZE)] == [counts[block] for block in range(self.SIZE)]
        assert self.pool.free == self.SIZE - len(counts)
        assert self.pool.headroom == self.headroom() >= 0
        assert self.pool.committed <= self.pool.total

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert self.pool.lease(self.SIZE).blocks == list(range(self.SIZE))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
