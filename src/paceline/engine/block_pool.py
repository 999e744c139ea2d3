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
from types import TracebackType
from typing import Final

from paceline.engine.extents import Extents, runs
from paceline.engine.prefix_cache import PrefixCache
from paceline.errors import EngineError
from paceline.prefix import BlockHash

__all__ = ["BlockLease", "BlockPool", "LeaseReleased", "PoolExhausted", "runs"]

_SEEDS: Final = 8
"""How many of the oldest blocks are looked at for a run around them that is long enough."""


class PoolExhausted(EngineError):
    """More blocks were asked for than are free. Admission answers it with `Overloaded`, growth with preemption."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} KV blocks were asked for and {free} are free")
        self.asked = asked
        self.free = free


class LeaseReleased(EngineError):
    """A lease used after its release: a fault of the holder."""

    def __init__(self) -> None:
        super().__init__("the block lease has already been released")


class BlockLease:
    """A handle on blocks of one pool, in the order of the tokens they hold. A `with` block releases it at its end."""

    __slots__ = ("_blocks", "_expected", "_pool", "_shared")

    def __init__(self, pool: BlockPool, blocks: list[int], *, shared: int = 0, expected: int = 0) -> None:
        self._pool: BlockPool | None = pool
        self._blocks = blocks
        self._shared = shared
        self._expected = expected

    def __len__(self) -> int:
        """Blocks held now."""
        return len(self._blocks)

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks held now. Read it, never change it; it grows in place by `extend`."""
        return self._blocks

    @property
    def shared(self) -> int:
        """How many of the first blocks were there already when the lease was made: they are never written."""
        return self._shared

    @property
    def expected(self) -> int:
        """Blocks that it is likely to ask for next. Admission counts with them; nothing is kept for it."""
        return self._expected

    @property
    def released(self) -> bool:
        """True once `release` was called."""
        return self._pool is None

    def extend(self, count: int) -> None:
        """Takes `count` more blocks. Raises `PoolExhausted`, and changes nothing, where as many are not free."""
        self._held().extend_lease(self, count)

    def grow_to(self, num_blocks: int) -> None:
        """Takes as many more as it needs to hold `num_blocks`; nothing if it holds them already."""
        if num_blocks > len(self._blocks):
            self.extend(num_blocks - len(self._blocks))

    def expect(self, count: int) -> None:
        """Says anew how many blocks it is likely to ask for next."""
        self._held().expect(count - self._expected)
        self._expected = count

    def adopt(self, prefix: Sequence[int]) -> None:
        """Takes blocks that can be found in place of its own first ones, which hold nothing yet and are let go."""
        self._held().adopt(self, prefix)

    def share(self, count: int | None = None) -> BlockLease:
        """Another lease on the first `count` blocks (all by default), which is not to write to them."""
        return self._held().share(self._blocks if count is None else self._blocks[:count])

    def split(self, at: int) -> BlockLease:
        """Moves the blocks from index `at` on to a lease of their own, which is returned. Expectations stay here."""
        pool = self._held()
        tail = BlockLease(pool, self._blocks[at:], shared=max(0, self._shared - at))
        del self._blocks[at:]
        self._shared = min(self._shared, at)
        return tail

    def join(self, tail: BlockLease) -> None:
        """Takes another lease's blocks over, behind its own; the other one is released by that."""
        pool = self._held()
        assert tail._held() is pool, "leases of one pool can be joined"
        if self._shared == len(self._blocks):
            self._shared += tail._shared
        self._blocks.extend(tail._blocks)
        pool.expect(-tail._expected)
        tail._pool, tail._expected = None, 0

    def release(self) -> None:
        """Lets go of the blocks. A second release raises `LeaseReleased`."""
        self._held().release_lease(self)
        self._pool = None
        self._expected = 0

    def _held(self) -> BlockPool:
        if self._pool is None:
            raise LeaseReleased
        return self._pool

    def __enter__(self) -> BlockLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self._shared} shared, +{self._expected} expected"
        return f"BlockLease({len(self._blocks)} blocks, {state})"


class BlockPool:
    """`num_blocks` KV blocks, with ids from 0. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
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
        """A lease on `prefix`, blocks that can be found, and on `count` others behind them.

        Raises `PoolExhausted`, and changes nothing, where `cost` says that they are not to be had.
        """
        if count < 0 or expected < 0:
            raise ValueError(f"a lease of {count} blocks, and {expected} to come, cannot be")
        cost = self.cost(count, prefix)
        if cost > self.free:
            raise PoolExhausted(cost, self.free)
        for block in prefix:
            self._hold(block)
        blocks = [*prefix, *self._acquire(count, after=prefix[-1] if prefix else None)]
        self._expected += expected
        return BlockLease(self, blocks, shared=len(prefix), expected=expected)

    def cost(self, count: int, prefix: Sequence[int] = ()) -> int:
        """Free blocks that `lease` would take: those found that nobody holds are among the free ones as well."""
        return count + sum(self._refs[block] == 0 for block in prefix)

    def share(self, blocks: Sequence[int]) -> BlockLease:
        """A lease on blocks that some lease already holds."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is free: only held blocks can be shared")
        for block in blocks:
            self._refs[block] += 1
        return BlockLease(self, list(blocks), shared=len(blocks))

    def refs(self, block: int) -> int:
        """How many leases hold the block."""
        return self._refs[block]

    def publish(self, lease: BlockLease, hashes: Sequence[BlockHash], *, start: int, parent: BlockHash | None) -> None:
        """Makes the lease's blocks from index `start` on findable, by hashes that chain behind `parent`."""
        self.cache.publish(lease.blocks[start : start + len(hashes)], hashes, parent)

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes blocks unfindable, whoever holds them: their content is not to be trusted."""
        for block in self.cache.forget(blocks):
            self._blank.put(block, 1)

    def adopt(self, lease: BlockLease, prefix: Sequence[int]) -> None:
        """Serves `BlockLease.adopt`. What was shared stays."""
        first, end = lease.shared, len(prefix)
        for block in prefix[first:]:
            self._hold(block)
        replaced = BlockLease(self, lease.blocks[first:end])
        lease.blocks[first:end] = prefix[first:]
        lease._shared = end
        self.release_lease(replaced)

    def expect(self, change: int) -> None:
        """Serves `BlockLease.expect`."""
        self._expected += change

    def extend_lease(self, lease: BlockLease, count: int) -> None:
        """Serves `BlockLease.extend`."""
        if count < 0:
            raise ValueError(f"a lease cannot be extended by {count}")
        if count > self.free:
            raise PoolExhausted(count, self.free)
        lease.blocks.extend(self._acquire(count, after=lease.blocks[-1] if lease.blocks else None))

    def release_lease(self, lease: BlockLease) -> None:
        """Serves `BlockLease.release`."""
        self._expected -= lease.expected
        self._returns += 1
        blank: list[int] = []
        for block in reversed(lease.blocks):  # the end of a chain is let go first, and so evicted first
            self._refs[block] -= 1
            if self._refs[block] == 0 and not self.cache.let_go(block):
                blank.append(block)
        for start, length in runs(sorted(blank)):
            self._blank.put(start, length)

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            self.cache.hold(block)
        self._refs[block] += 1

    def _acquire(self, count: int, after: int | None) -> list[int]:
        """`count` blocks, which are free, in few runs. For those, about as many idle ones are evicted at most."""
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
