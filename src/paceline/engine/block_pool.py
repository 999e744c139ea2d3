"""The books of the KV pool: which block is whose, and what was promised. It knows block ids, not memory.

A request gets a `BlockLease`: some blocks now, and a promise of more for its growth. The promise is kept because
`committed` counts both and admission refuses what would take it over `total`, so an accepted request never runs out::

    used + promised = committed <= total          used + free = total

Blocks are ref-counted: two leases may hold one block (`share`), which is free again when the last lets go.
Runs of consecutive ids are preferred, because neighbouring blocks travel as one piece.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from types import TracebackType

from paceline.errors import EngineError


class PoolExhausted(EngineError):
    """A lease for more blocks than the pool can still promise. Admission answers it with `Overloaded`."""

    def __init__(self, asked: int, headroom: int) -> None:
        super().__init__(f"{asked} KV blocks were asked for and {headroom} can still be promised")
        self.asked = asked
        self.headroom = headroom


class LeaseReleased(EngineError):
    """A lease used after its release: a fault of the holder."""

    def __init__(self) -> None:
        super().__init__("the block lease has already been released")


class BlockLease:
    """A handle on blocks of one pool, in the order of the tokens they hold. A `with` block releases it at its end."""

    __slots__ = ("_blocks", "_pool", "_promised")

    def __init__(self, pool: BlockPool, blocks: list[int], promised: int) -> None:
        self._pool: BlockPool | None = pool
        self._blocks = blocks
        self._promised = promised

    def __len__(self) -> int:
        """Blocks held now."""
        return len(self._blocks)

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks held now. Read it, never change it; it grows in place by `extend`."""
        return self._blocks

    @property
    def promised(self) -> int:
        """Blocks that `extend` may still take without asking for admission."""
        return self._promised

    @property
    def capacity(self) -> int:
        """Blocks held now, and those promised."""
        return len(self._blocks) + self._promised

    @property
    def released(self) -> bool:
        """True once `release` was called."""
        return self._pool is None

    def extend(self, count: int) -> None:
        """Takes `count` more blocks, out of the promise first.

        Raises `PoolExhausted` if the pool can't promise the rest.
        """
        self._held().extend_lease(self, count)

    def grow_to(self, num_blocks: int) -> None:
        """Takes as many more as it needs to hold `num_blocks`; nothing if it holds them already."""
        if num_blocks > len(self._blocks):
            self.extend(num_blocks - len(self._blocks))

    def share(self, count: int | None = None) -> BlockLease:
        """Another lease on the first `count` blocks (all by default), without a promise."""
        return self._held().share(self._blocks if count is None else self._blocks[:count])

    def release(self) -> None:
        """Lets go of blocks and promise. A second release raises `LeaseReleased`."""
        self._held().release_lease(self)
        self._pool = None
        self._promised = 0

    def _held(self) -> BlockPool:
        if self._pool is None:
            raise LeaseReleased
        return self._pool

    def _take(self, blocks: Iterable[int], kept_promise: int) -> None:
        self._blocks.extend(blocks)
        self._promised -= kept_promise

    def __enter__(self) -> BlockLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"+{self._promised} promised"
        return f"BlockLease({len(self._blocks)} blocks, {state})"


class FreeExtents:
    """The free blocks as maximal runs: found by size for best fit, by either end for merging."""

    def __init__(self, num_blocks: int) -> None:
        self._by_size: list[tuple[int, int]] = []  # (length, start), ascending
        self._length_at: dict[int, int] = {}  # start -> length
        self._start_before: dict[int, int] = {}  # end (exclusive) -> start
        self.free = 0
        if num_blocks:
            self.put(0, num_blocks)

    def put(self, start: int, length: int) -> None:
        """Returns a run, merged with its free neighbours."""
        self.free += length
        before = self._start_before.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if start + length in self._length_at:
            length += self._remove(start + length)
        self._insert(start, length)

    def take(self, count: int, after: int | None) -> list[int]:
        """`count` blocks (there must be as many) in few runs: first those that follow block `after`, then best fit."""
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at:
            taken.extend(self._cut(after + 1, count))
        while len(taken) < count:
            missing = count - len(taken)
            fit = bisect_left(self._by_size, (missing, -1))
            _, start = self._by_size[fit] if fit < len(self._by_size) else self._by_size[-1]
            taken.extend(self._cut(start, missing))
        return taken

    def _cut(self, start: int, count: int) -> range:
        length = self._remove(start)
        cut = min(count, length)
        if cut < length:
            self._insert(start + cut, length - cut)
        self.free -= cut
        return range(start, start + cut)

    def _insert(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        return length


class BlockPool:
    """`num_blocks` KV blocks, with ids from 0. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._extents = FreeExtents(num_blocks)
        self._refs = [0] * num_blocks
        self._promised = 0

    @property
    def free(self) -> int:
        """Blocks that no lease holds, promised ones included."""
        return self._extents.free

    @property
    def used(self) -> int:
        """Blocks that some lease holds."""
        return self.total - self.free

    @property
    def committed(self) -> int:
        """Blocks held or promised: never over `total`."""
        return self.used + self._promised

    @property
    def headroom(self) -> int:
        """Blocks that a new lease may still ask for."""
        return self.total - self.committed

    def lease(self, count: int, *, promise: int = 0) -> BlockLease:
        """`count` blocks now and `promise` more on demand. Raises `PoolExhausted` when both can't be had."""
        if count < 0 or promise < 0:
            raise ValueError(f"a lease of {count} blocks and {promise} more cannot be")
        self._admit(count + promise)
        self._promised += promise
        return BlockLease(self, self._acquire(count, after=None), promise)

    def share(self, blocks: Sequence[int]) -> BlockLease:
        """A lease on blocks that some lease already holds."""
        for block in blocks:
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is free: only held blocks can be shared")
        for block in blocks:
            self._refs[block] += 1
        return BlockLease(self, list(blocks), 0)

    def refs(self, block: int) -> int:
        """How many leases hold the block."""
        return self._refs[block]

    def extend_lease(self, lease: BlockLease, count: int) -> None:
        """Serves `BlockLease.extend`."""
        if count < 0:
            raise ValueError(f"a lease cannot be extended by {count}")
        from_promise = min(count, lease.promised)
        self._admit(count - from_promise)
        self._promised -= from_promise
        lease._take(self._acquire(count, after=lease.blocks[-1] if lease.blocks else None), from_promise)

    def release_lease(self, lease: BlockLease) -> None:
        """Serves `BlockLease.release`."""
        self._promised -= lease.promised
        idle: list[int] = []
        for block in lease.blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                idle.append(block)
        for start, length in runs(sorted(idle)):
            self._extents.put(start, length)

    def _admit(self, count: int) -> None:
        if count > self.headroom:
            raise PoolExhausted(count, self.headroom)

    def _acquire(self, count: int, after: int | None) -> list[int]:
        blocks = self._extents.take(count, after)
        for block in blocks:
            self._refs[block] = 1
        return blocks


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive ids, in the given order, as (start, length)."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
