"""A lease's tables: what is let go is counted out at once, whatever was found, taken over, shared or promised."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.block_lease import BlockLease, Hit
from paceline.engine.block_pool import BlockPool, PoolExhausted


def live(lease: BlockLease) -> list[list[int]]:
    return [table[gone:] for table, gone in zip(lease.tables, lease.gone, strict=True)]


def test_a_lease_has_a_table_for_each_group() -> None:
    pool = BlockPool(20, groups=2)
    lease = pool.lease(3)
    assert (lease.tables, lease.reach, len(lease), pool.free) == ([[0, 1, 2], [3, 4, 5]], 3, 6, 14)
    lease.grow_to(4)
    assert (list(map(len, lease.tables)), pool.free) == ([4, 4], 12)
    with pytest.raises(PoolExhausted):
        lease.grow_to(11)
    assert (list(map(len, lease.tables)), pool.free) == ([4, 4], 12)


def test_what_slides_out_is_free_and_the_places_behind_it_stay() -> None:
    pool = BlockPool(12, groups=2)
    lease = pool.lease(5)
    lease.slide([0, 3])
    assert (live(lease), lease.reach, pool.free) == ([[0, 1, 2, 3, 4], [8, 9]], 5, 5)
    lease.slide([0, 2])  # is not taken back
    assert live(lease) == [[0, 1, 2, 3, 4], [8, 9]]
    lease.release()
    assert pool.free == 12


def test_what_slides_out_is_taken_in_hand_again_as_far_as_it_is_promised() -> None:
    pool = BlockPool(8)
    lease = pool.lease(6)
    lease.slide([4], stock=3)
    assert (lease.spare, pool.free, lease.lacking(9), lease.lacking(10)) == (3, 3, 0, 1)
    lease.grow_to(9)
    assert (lease.spare, pool.free, len(lease)) == (0, 3, 5)


def test_a_block_that_another_lease_holds_is_not_free_when_it_slides_out() -> None:
    pool = BlockPool(6)
    lease = pool.lease(4)
    other = lease.share(2)
    lease.slide([3], stock=9)
    assert (lease.spare, pool.free, pool.refs(0), pool.refs(2)) == (1, 2, 1, 1)
    other.release()
    assert pool.free == 4


def test_a_tail_that_landed_lets_go_of_what_lies_before_its_window() -> None:
    pool = BlockPool(20, groups=2)
    held = pool.lease(2)
    tail = pool.open(Hit.none(2), [3, 1], skipped=[0, 2])
    held.join(tail)
    assert (live(held), held.reach, pool.used) == ([[0, 1, 4, 5, 6], [7]], 5, 6)
    assert held.gone == [0, 4]


def test_a_tail_that_is_to_be_computed_is_in_hand_where_its_table_has_a_gap() -> None:
    pool = BlockPool(20, groups=2)
    held = pool.lease(2)
    held.take_in(pool.open(Hit.none(2), [3, 1], skipped=[0, 2]))
    assert (live(held), held.reach, held.spare, pool.used) == ([[0, 1, 4, 5, 6], [2, 3]], 2, 1, 8)
    held.grow_to(3)
    assert (live(held), held.spare) == ([[0, 1, 4, 5, 6], [2, 3, 7]], 0)


def test_what_is_found_takes_the_place_of_what_was_lent_for_it() -> None:
    pool = BlockPool(30, groups=2)
    found = pool.lease(4)
    lease = pool.open(Hit.none(2), [5, 0], spare=3)
    lease.adopt(Hit(4, (found.tables[0], found.tables[1][2:])))
    assert (live(lease)[1], lease.shared, lease.gone, lease.spare) == (found.tables[1][2:], 4, [0, 2], 3)
    assert lease.tables[0][:4] == found.tables[0]
    lease.trim(1)
    assert pool.used == 8 + 1 + 1
    lease.release()
    found.release()
    assert pool.free == 30


class LeasesAgainstModel(RuleBasedStateMachine):
    """Any sequence of what leases can do leaves the books equal to a naive count of who holds what."""

    SIZE, GROUPS = 40, 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE, groups=self.GROUPS)
        self.leases: list[BlockLease] = []

    @rule(
        counts=st.tuples(*[st.integers(0, 4)] * GROUPS),
        skipped=st.none() | st.tuples(*[st.integers(0, 3)] * GROUPS),
        spare=st.integers(0, 3),
        expected=st.integers(0, 4),
    )
    def open(self, counts: tuple[int, ...], skipped: tuple[int, ...] | None, spare: int, expected: int) -> None:
        if sum(counts) + spare > self.pool.free:
            with pytest.raises(PoolExhausted):
                self.pool.open(Hit.none(self.GROUPS), counts, skipped=skipped, spare=spare, expected=expected)
            return
        lease = self.pool.open(Hit.none(self.GROUPS), counts, skipped=skipped, spare=spare, expected=expected)
        assert len(lease) == sum(counts) + spare
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reach=st.integers(0, 8))
    def grow(self, data: st.DataObject, reach: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        before, held = [list(table) for table in lease.tables], set(lease.blocks)
        if lease.lacking(reach) > self.pool.free:
            with pytest.raises(PoolExhausted):
                lease.grow_to(reach)
            assert lease.tables == before
            return
        lease.grow_to(reach)
        assert lease.reach >= reach
        assert held <= set(lease.blocks)
        assert [table[: len(old)] for table, old in zip(lease.tables, before, strict=True)] == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), stock=st.integers(0, 4))
    def slide(self, data: st.DataObject, stock: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        gone = [data.draw(st.integers(0, len(table))) for table in lease.tables]
        wanted = [table[max(new, old) :] for table, new, old in zip(lease.tables, gone, lease.gone, strict=True)]
        spare = lease.spare
        lease.slide(gone, stock=stock)
        assert live(lease) == wanted
        assert spare <= lease.spare <= max(spare, stock)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.append(lease.share(data.draw(st.integers(0, lease.reach))))

    @precondition(lambda self: len(self.leases) > 1)
    @rule(data=st.data(), filled=st.booleans())
    def take_over(self, data: st.DataObject, filled: bool) -> None:
        lease, tail = data.draw(st.permutations(self.leases))[:2]
        both = Counter(lease.blocks) + Counter(tail.blocks)
        (lease.join if filled else lease.take_in)(tail)
        self.leases.remove(tail)
        assert Counter(lease.blocks) <= both
        assert filled or Counter(lease.blocks) == both

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), spare=st.integers(0, 3))
    def stock_and_trim(self, data: st.DataObject, spare: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if spare - lease.spare > self.pool.free:
            with pytest.raises(PoolExhausted):
                lease.stock(spare)
            return
        lease.stock(spare)
        lease.trim(spare)
        assert lease.spare == spare

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).release()

    @invariant()
    def the_books_agree(self) -> None:
        counts = Counter(block for lease in self.leases for block in lease.blocks)
        assert [self.pool.refs(block) for block in range(self.SIZE)] == [counts[block] for block in range(self.SIZE)]
        assert self.pool.free == self.SIZE - len(counts)
        assert self.pool.expected == sum(lease.expected for lease in self.leases)
        assert all(len(lease) == len(lease.blocks) for lease in self.leases)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert self.pool.free == self.SIZE


TestLeasesAgainstModel = LeasesAgainstModel.TestCase
TestLeasesAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
