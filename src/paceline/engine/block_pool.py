"""The books of the KV pool: which block is whose, and what can be found by its content. It knows block ids, not memory.

A request gets a `BlockLease`: some blocks now, and more on demand, as long as there are any. What it is expected to ask
for is noted beside, for admission to count with; nothing is kept for it::

    used + free = total      free = blank + idle      committed = min(total, used + expected)

Blocks are ref-counted: leases may share one (`share`, or a prefix found in the cache), which is free again when the
last lets go. A free block that can still be found by its hash is idle, else blank; idle ones are evicted when blank
ones do not do. Runs of consecutive ids are preferred, because neighbouring blocks travel as one piece, and eviction
makes runs: with the oldest block go its neighbours, if they are old too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from paceline.engine.block_lease import BlockLease, Hit, LeaseReleased
from paceline.engine.extents import Extents, runs
from paceline.engine.prefix_cache import PrefixCache
from paceline.errors import EngineError
from paceline.prefix import BlockHash

__all__ = ["BlockLease", "BlockPool", "Hit", "LeaseReleased", "PoolExhausted", "runs"]

_SEEDS: Final = 8
"""How many of the oldest blocks are looked at for a run around them that is long enough."""


class PoolExhausted(EngineError):
    """More blocks were asked for than are free. Admission answers it with `Overloaded`, growth with preemption."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} KV blocks were asked for and {free} are free")
        self.asked = asked
        self.free = free


class BlockPool:
    """`num_blocks` KV blocks, with ids from 0, which `groups` KV groups share.

    Not thread-safe: it belongs to the engine's loop.
    """

    def __init__(self, num_blocks: int, *, groups: int = 1) -> None:
        self.total = num_blocks
        self.groups = groups
        self.cache = PrefixCache()
        self._blank = Extents(num_blocks)
        self._refs = [0] * num_blocks
        self._expected = 0
        self._returns = 0

    @property
    def free(self) -> int:
        """Blocks that no lease holds, be they findable."""
        return self._blank.count + self.cache.idle

    @property
    def used(self) -> int:
        """Blocks that some lease holds."""
        return self.total - self.free

    @property
    def expected(self) -> int:
        """Blocks that the leases are likely to ask for next."""
        return self._expected

    @property
    def committed(self) -> int:
        """Blocks that are held, and those that the leases are likely to ask for next."""
        return min(self.total, self.used + self._expected)

    @property
    def returns(self) -> int:
        """How often blocks have come back: while it stands still, what did not fit does not fit."""
        return self._returns

    def lease(self, count: int, *, prefix: Sequence[int] = (), expected: int = 0) -> BlockLease:
        """A lease with `count` places in every table, behind those of `prefix`: blocks that can be found, of the only
        group.

        Raises `PoolExhausted`, and changes nothing, where `cost` says that they are not to be had.
        """
        hit = Hit(len(prefix), (prefix,)) if prefix else Hit.none(self.groups)
        return self.open(hit, [count] * self.groups, expected=expected)

    def open(
        self,
        hit: Hit,
        counts: Sequence[int],
        *,
        skipped: Sequence[int] | None = None,
        spare: int = 0,
        expected: int = 0,
    ) -> BlockLease:
        """A lease on what was found, on `counts` blocks of each group behind it, and on `spare` blocks in hand.

        With `skipped`, and without a hit, each table begins with as many places that hold nothing. Raises as `lease`.
        """
        if min(counts) < 0 or spare < 0 or expected < 0:
            raise ValueError(f"a lease of {counts} blocks, {spare} spare ones and {expected} to come cannot be")
        found = hit.blocks
        self.check_free(self.cost(sum(counts) + spare, found))
        self.hold(found)
        gone = [hit.reach - len(table) for table in hit.tables] if skipped is None else list(skipped)
        tables = []
        for count, table, empty in zip(counts, hit.tables, gone, strict=True):
            tables.append([*[0] * empty, *table, *self.acquire(count, after=table[-1] if table else None)])
        in_hand = self.acquire(spare, after=None) if spare else []
        self._expected += expected
        return BlockLease(self, tables, gone=gone, spare=in_hand, shared=hit.reach, expected=expected)

    def cost(self, count: int, found: Sequence[int] = ()) -> int:
        """Free blocks that `count` new ones and those found take: of these, what nobody holds is free as well."""
        return count + sum(self._refs[block] == 0 for block in found)

    def check_free(self, count: int) -> None:
        """Raises `PoolExhausted` where fewer blocks are free."""
        if count > self.free:
            raise PoolExhausted(count, self.free)

    def share(self, tables: list[list[int]], gone: list[int]) -> BlockLease:
        """Serves `BlockLease.share`."""
        lease = BlockLease(self, tables, gone=gone, shared=min(map(len, tables)))
        for block in lease.blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is free: only held blocks can be shared")
        self.hold(lease.blocks)
        return lease

    def refs(self, block: int) -> int:
        """How many leases hold the block."""
        return self._refs[block]

    def publish(self, lease: BlockLease, hashes: Sequence[BlockHash], *, start: int, parent: BlockHash | None) -> None:
        """Makes the lease's blocks from place `start` on findable, by hashes that chain behind `parent`."""
        for group in range(self.groups):
            self.publish_group(lease, group, hashes, start=start, parent=parent)

    def publish_group(
        self, lease: BlockLease, group: int, hashes: Sequence[BlockHash], *, start: int, parent: BlockHash | None
    ) -> None:
        """As `publish`, of one group, as far as the lease has not let go of them."""
        passed = max(0, lease.gone[group] - start)
        blocks = lease.tables[group][start + passed : start + len(hashes)]
        parent = hashes[passed - 1] if 0 < passed <= len(hashes) else parent
        self.cache.publish(blocks, hashes[passed:], parent, group=group)

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes blocks unfindable, whoever holds them: their content is not to be trusted."""
        for block in self.cache.forget(blocks):
            self._blank.put(block, 1)

    def expect(self, change: int) -> None:
        """Serves `BlockLease.expect`."""
        self._expected += change

    def hold(self, blocks: Iterable[int]) -> None:
        """Serves leases: one more of them holds the blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                self.cache.hold(block)
            self._refs[block] += 1

    def let_go(self, blocks: Sequence[int]) -> int:
        """Serves leases: one less of them holds the blocks. Returns how many that frees."""
        self._returns += 1
        freed, blank = 0, []
        for block in reversed(blocks):  # the end of a chain is let go first, and so evicted first
            self._refs[block] -= 1
            if self._refs[block] == 0:
                freed += 1
                if not self.cache.let_go(block):
                    blank.append(block)
        for start, length in runs(sorted(blank)):
            self._blank.put(start, length)
        return freed

    def acquire(self, count: int, after: int | None) -> list[int]:
        """Serves leases: takes `count` blocks, which are free, in few runs.

        For those, about as many idle ones are evicted at most. They should follow the block `after`.
        """
        follows = 0 if after is None else self._blank.run_from(after + 1)
        missing, evicted = max(0, count - follows), 0
        while self._blank.count < count or (self._blank.longest < missing and evicted < missing and self.cache.idle):
            evicted += self._evict(max(1, missing))
        blocks = self._blank.take(count, after)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _evict(self, wanted: int) -> int:
        """Evicts one old idle block with its neighbours, for a run of `wanted` blocks if there is one."""
        best = range(0)
        seen = 0
        for seed in self.cache.oldest():
            if seed in best:
                continue
            window = self._window(seed, wanted)
            if len(window) > len(best):
                best = window
            seen += 1
            if len(best) >= wanted or seen == _SEEDS:
                break
        evicted = self.cache.forget([block for block in best if self.cache.is_idle(block)])
        for start, length in runs(sorted(evicted)):
            self._blank.put(start, length)
        return len(evicted)

    def _window(self, seed: int, wanted: int) -> range:
        """A run of free blocks around an idle one, for `wanted` blocks: blank neighbours first, then the oldest."""
        first, end = seed, seed + 1
        limit = self.cache.old_age
        while end - first < wanted:
            blank_left, blank_right = self._blank.run_until(first), self._blank.run_from(end)
            if blank_left or blank_right:
                first -= blank_left
                end += blank_right
                continue
            ages = [(age, block) for block in (first - 1, end) if (age := self.cache.age(block)) is not None]
            if not ages or min(ages)[0] > limit:
                break
            block = min(ages)[1]
            first, end = min(first, block), max(end, block + 1)
        return range(first, end)
