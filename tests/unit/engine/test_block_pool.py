"""The pool's books: blocks counted once, runs preferred, hits that are what was stored, releases that happen once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.block_pool import BlockLease, BlockPool, LeaseReleased, PoolExhausted, runs
from paceline.prefix import KvRemoved, KvStored, block_hashes
from paceline.testing.cache_model import CacheModel
from paceline.types import BLOCK_TOKENS


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
    lease = pool.lease(2, expected=1)
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.extend(1)
    with pytest.raises(LeaseReleased):
        lease.expect(1)
    with pytest.raises(LeaseReleased):
        lease.share()
    assert (pool.free, pool.committed) == (4, 0)


def test_what_a_lease_expects_is_counted_and_not_kept() -> None:
    pool = BlockPool(8)
    lease = pool.lease(2, expected=4)
    assert (pool.used, pool.expected, pool.committed) == (2, 4, 6)
    other = pool.lease(6)
    assert (pool.free, pool.committed) == (0, 8)
    with pytest.raises(PoolExhausted, match=r"1 KV blocks were asked for and 0 are free"):
        lease.extend(1)
    assert (len(lease), lease.expected) == (2, 4)
    other.release()
    lease.grow_to(6)
    lease.expect(1)
    assert (len(lease.blocks), pool.committed) == (6, 7)
    lease.release()
    assert (pool.free, pool.expected) == (8, 0)


def test_a_refused_lease_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.lease(1, expected=1)
    with pytest.raises(PoolExhausted):
        pool.lease(4, expected=2)
    assert (pool.free, pool.committed) == (3, 2)


def test_a_lease_that_takes_another_over_is_one_lease() -> None:
    pool = BlockPool(8)
    lease, tail = pool.lease(2, expected=2), pool.lease(3, expected=1)
    lease.join(tail)
    assert (lease.blocks, lease.expected, pool.expected, tail.released) == ([0, 1, 2, 3, 4], 2, 2, True)
    with pytest.raises(LeaseReleased):
        tail.release()
    lease.release()
    assert (pool.free, pool.expected) == (8, 0)


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
        pool.share([[0, 1]], [0])
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


def published(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a request that came, stored its tokens and left."""
    hashes = block_hashes(tokens)
    found = pool.cache.find(hashes)
    with pool.lease(len(hashes) - len(found), prefix=found) as lease:
        pool.publish(lease, hashes, start=0, parent=None)
        return list(lease.blocks)


def prompt(name: int, blocks: int) -> list[int]:
    return [name] * BLOCK_TOKENS * blocks


def test_a_block_that_nobody_holds_is_free_and_can_be_found() -> None:
    pool = BlockPool(8)
    blocks = published(pool, prompt(1, 3))
    assert (pool.free, pool.cache.idle) == (8, 3)
    found = pool.cache.find(block_hashes(prompt(1, 3)))
    assert found == blocks
    lease = pool.lease(2, prefix=found)
    assert (lease.shared, lease.blocks, pool.free, pool.cache.idle) == (3, [0, 1, 2, 3, 4], 3, 0)
    lease.release()
    assert pool.free == 8


def test_found_blocks_that_nobody_holds_count_towards_what_a_lease_takes() -> None:
    pool = BlockPool(4)
    found = published(pool, prompt(1, 3))
    assert pool.cost(2, found) == 5
    with pytest.raises(PoolExhausted):
        pool.lease(2, prefix=found)
    with pool.lease(0, prefix=found):
        assert pool.cost(1, found) == 1
    assert (pool.free, pool.cache.idle) == (4, 3)


def test_an_evicted_block_is_never_found() -> None:
    pool = BlockPool(4)
    published(pool, prompt(1, 4))
    pool.lease(1)
    assert len(pool.cache.find(block_hashes(prompt(1, 4)))) == 3
    pool.lease(3)
    assert pool.cache.find(block_hashes(prompt(1, 4))) == []


def test_the_oldest_chain_is_evicted_first_and_from_its_end() -> None:
    pool = BlockPool(8)
    published(pool, prompt(1, 4))
    published(pool, prompt(2, 4))
    published(pool, prompt(1, 4))
    pool.lease(3)
    assert len(pool.cache.find(block_hashes(prompt(1, 4)))) == 4
    assert len(pool.cache.find(block_hashes(prompt(2, 4)))) == 1


def test_eviction_makes_runs_of_what_is_old() -> None:
    pool = BlockPool(64)
    for name in range(8):
        published(pool, prompt(name, 8))
    assert runs(pool.lease(8).blocks) == [(0, 8)]
    assert runs(pool.lease(12).blocks) == [(8, 12)]


def test_a_hash_that_is_stored_twice_keeps_its_first_block() -> None:
    pool = BlockPool(8)
    hashes = block_hashes(prompt(1, 2))
    first, second = pool.lease(2), pool.lease(2)
    pool.publish(first, hashes, start=0, parent=None)
    pool.publish(second, hashes, start=0, parent=None)
    assert pool.cache.find(hashes) == first.blocks
    second.release()
    assert (pool.cache.idle, pool.free) == (0, 6)
    first.release()
    assert (pool.cache.idle, pool.free) == (2, 8)


def test_forgotten_blocks_are_not_found_though_others_hold_them() -> None:
    pool = BlockPool(8)
    published(pool, prompt(1, 3))
    found = pool.cache.find(block_hashes(prompt(1, 3)))
    lease = pool.lease(0, prefix=found)
    pool.forget(lease.blocks)
    assert pool.cache.find(block_hashes(prompt(1, 3))) == []
    lease.release()
    assert (pool.free, pool.cache.idle) == (8, 0)
    published(pool, prompt(2, 3))
    pool.forget(range(8))
    assert (pool.free, pool.cache.idle, len(pool.cache)) == (8, 0, 0)
    assert pool.lease(8).blocks == list(range(8))


def test_the_changes_tell_chains_and_their_parents_in_order() -> None:
    pool = BlockPool(4)
    a, b, c = block_hashes(prompt(1, 3))
    lease = pool.lease(3)
    pool.publish(lease, [a, b], start=0, parent=None)
    pool.publish(lease, [c], start=2, parent=b)
    lease.release()
    pool.lease(2)
    assert pool.cache.take_changes() == (KvStored(None, (a, b)), KvStored(b, (c,)), KvRemoved((c,)))
    assert pool.cache.take_changes() == ()


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_operations_find_what_a_dictionary_holds_and_nothing_else(seed: int) -> None:
    """F20."""
    model = CacheModel(40 + 40 * seed, seed=seed)
    for _ in range(10_000):
        model.step()
    model.drain()
    assert model.hits > 500
    assert model.evicted > 500


class PoolAgainstModel(RuleBasedStateMachine):
    """Any sequence of leases, growth, sharing and releases leaves the books equal to a naive count."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.leases: list[BlockLease] = []

    def headroom(self) -> int:
        return self.SIZE - len({block for lease in self.leases for block in lease.blocks})

    @rule(count=st.integers(0, 10), expected=st.integers(0, 6))
    def lease(self, count: int, expected: int) -> None:
        if count > self.headroom():
            with pytest.raises(PoolExhausted):
                self.pool.lease(count, expected=expected)
            return
        lease = self.pool.lease(count, expected=expected)
        assert len(lease.blocks) == count
        assert not set(lease.blocks) & {block for other in self.leases for block in other.blocks}
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 8))
    def extend(self, data: st.DataObject, count: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        before = list(lease.blocks)
        others = {block for other in self.leases for block in other.blocks}
        if count > self.headroom():
            with pytest.raises(PoolExhausted):
                lease.extend(count)
            assert lease.blocks == before
            return
        lease.extend(count)
        assert lease.blocks[: len(before)] == before
        assert len(lease.blocks) == len(before) + count
        assert not set(lease.blocks[len(before) :]) & others

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 10))
    def share(self, data: st.DataObject, count: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        shared = lease.share(count)
        assert shared.blocks == lease.blocks[:count]
        self.leases.append(shared)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 6))
    def expect(self, data: st.DataObject, count: int) -> None:
        data.draw(st.sampled_from(self.leases)).expect(count)

    @precondition(lambda self: len(self.leases) > 1)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        lease, tail = data.draw(st.permutations(self.leases))[:2]
        both = lease.blocks + tail.blocks
        lease.join(tail)
        self.leases.remove(tail)
        assert lease.blocks == both

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
        assert self.pool.free == self.SIZE - len(counts) == self.headroom()
        assert self.pool.expected == sum(lease.expected for lease in self.leases)
        assert self.pool.committed == min(self.SIZE, len(counts) + self.pool.expected)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert self.pool.lease(self.SIZE).blocks == list(range(self.SIZE))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
