"""A handle on blocks of a pool: a block table for each KV group, and blocks in hand that no table names yet.

Places in a table are counted in blocks of tokens: the place `i` of every table is for tokens `16 * i` to `16 * i + 15`.
The tables of groups without a window hold all blocks from the first on. Those of groups with one have let go of what
slid out, and their entries in front of that mean nothing::

    0 <= gone[group] <= len(tables[group])        len(lease) = sum(len(tables[g]) - gone[g]) + len(spare)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.errors import EngineError

if TYPE_CHECKING:
    from paceline.engine.block_pool import BlockPool


class LeaseReleased(EngineError):
    """A lease used after its release: a fault of the holder."""

    def __init__(self) -> None:
        super().__init__("the block lease has already been released")


@dataclass(frozen=True, slots=True)
class Hit:
    """A prompt's beginning as the cache has it: of each group the blocks that are read by what comes behind it."""

    reach: int  # blocks of tokens
    tables: tuple[Sequence[int], ...]  # of each group the last blocks up to `reach`; without a window all

    @classmethod
    def none(cls, groups: int) -> Hit:
        """Nothing was found."""
        return cls(0, ((),) * groups)

    @property
    def blocks(self) -> list[int]:
        """All of them."""
        return [block for table in self.tables for block in table]


class BlockLease:
    """Blocks of one pool, in the order of the tokens they hold. A `with` block releases it at its end."""

    __slots__ = ("_expected", "_gone", "_pool", "_shared", "_spare", "_tables")

    def __init__(
        self,
        pool: BlockPool,
        tables: list[list[int]],
        *,
        gone: list[int] | None = None,
        spare: list[int] | None = None,
        shared: int = 0,
        expected: int = 0,
    ) -> None:
        self._pool: BlockPool | None = pool
        self._tables = tables
        self._gone = [0] * len(tables) if gone is None else gone
        self._spare = [] if spare is None else spare
        self._shared = shared
        self._expected = expected

    def __len__(self) -> int:
        """Blocks held now, of all groups."""
        return sum(map(len, self._tables)) - sum(self._gone) + len(self._spare)

    @property
    def tables(self) -> list[list[int]]:
        """The block table of each group. Read them, never change them; they grow in place."""
        return self._tables

    @property
    def gone(self) -> list[int]:
        """Of each table the entries in front that mean nothing."""
        return self._gone

    @property
    def blocks(self) -> list[int]:
        """Ids of all blocks held now, one group's after the other's, in order; then those that no table names."""
        live = [block for table, gone in zip(self._tables, self._gone, strict=True) for block in table[gone:]]
        return live + self._spare

    @property
    def reach(self) -> int:
        """Blocks of tokens, from the first, for which every table has a place."""
        return min(map(len, self._tables))

    @property
    def spare(self) -> int:
        """Blocks in hand that no table names yet."""
        return len(self._spare)

    @property
    def shared(self) -> int:
        """How many of the first places were filled already when the lease was made: they are never written."""
        return self._shared

    @property
    def expected(self) -> int:
        """Blocks that it is likely to ask for next. Admission counts with them; nothing is kept for it."""
        return self._expected

    @property
    def released(self) -> bool:
        """True once `release` was called."""
        return self._pool is None

    def lacking(self, reach: int) -> int:
        """Blocks that it has to ask the pool for, to have places up to `reach` in every table."""
        missing = -len(self._spare)
        for table in self._tables:
            if len(table) < reach:
                missing += reach - len(table)
        return max(0, missing)

    def extend(self, count: int) -> None:
        """Makes `count` more places in every table. Raises `PoolExhausted`, and changes nothing, without the blocks."""
        if count < 0:
            raise ValueError(f"a lease cannot be extended by {count}")
        self._fill([len(table) + count for table in self._tables])

    def grow_to(self, reach: int) -> None:
        """Makes places up to `reach` in every table; nothing where they are there. Raises as `extend` does."""
        self._fill([max(len(table), reach) for table in self._tables])

    def _fill(self, ends: Sequence[int]) -> None:
        pool = self._held()
        missing = [end - len(table) for table, end in zip(self._tables, ends, strict=True)]
        short = sum(missing) - len(self._spare)
        pool.check_free(short)
        for table, count in zip(self._tables, missing, strict=True):
            if not count:
                continue
            spare, self._spare = self._spare[:count], self._spare[count:]
            table += spare
            if count > len(spare):
                table += pool.acquire(count - len(spare), after=table[-1] if table else None)

    def stock(self, count: int) -> None:
        """Takes blocks in hand, until `count` are that no table names. Raises `PoolExhausted`, and changes nothing."""
        pool, short = self._held(), count - len(self._spare)
        if short > 0:
            pool.check_free(short)
            self._spare += pool.acquire(short, after=self._spare[-1] if self._spare else None)

    def slide(self, gone: Sequence[int], *, stock: int = 0) -> None:
        """Lets go of each table's blocks in front of place `gone`. Those that this frees are taken in hand again, as
        long as less than `stock` are: they were promised to it.
        """
        pool = self._held()
        freed = 0
        for group, (table, before, after) in enumerate(zip(self._tables, self._gone, gone, strict=True)):
            if after > before:
                freed += pool.let_go(table[before:after])
                self._gone[group] = min(after, len(table))
        again = min(freed, stock - len(self._spare))
        if again > 0:
            self._spare += pool.acquire(again, after=None)

    def expect(self, count: int) -> None:
        """Says anew how many blocks it is likely to ask for next."""
        self._held().expect(count - self._expected)
        self._expected = count

    def trim(self, spare: int) -> None:
        """Lets go of what no table names but for `spare` blocks."""
        self._held().let_go(self._spare[spare:])
        del self._spare[spare:]

    def adopt(self, hit: Hit) -> None:
        """Takes what was found in place of its own first blocks, which hold nothing yet and are let go."""
        pool = self._held()
        pool.hold(hit.blocks)
        replaced: list[int] = []
        for group, found in enumerate(hit.tables):
            table = self._tables[group]
            replaced += table[self._gone[group] : hit.reach]
            table[: hit.reach] = [*[0] * (hit.reach - len(found)), *found]
            self._gone[group] = hit.reach - len(found)
        self._shared = hit.reach
        pool.let_go(replaced)

    def share(self, reach: int | None = None) -> BlockLease:
        """Another lease on the blocks in the first `reach` places (all by default), which is not to write to them."""
        tables = [table[:reach] for table in self._tables]
        gone = [min(gone, len(table)) for gone, table in zip(self._gone, tables, strict=True)]
        return self._held().share(tables, gone)

    def join(self, tail: BlockLease) -> None:
        """Takes over a lease on what comes behind, all of it filled; the other one is released by that.

        Where the other has let go of what it has in front, so does this one of all it has.
        """
        pool = self._take(tail)
        for group, (table, more, skipped) in enumerate(zip(self._tables, tail._tables, tail._gone, strict=True)):
            if skipped:
                pool.let_go(table[self._gone[group] :])
                self._gone[group] = len(table) + skipped
            table += more
        self._spare += tail._spare

    def take_in(self, tail: BlockLease) -> None:
        """Takes over a lease on what comes behind, none of it filled; the other one is released by that.

        Tables without gaps go on with its blocks; of the others they are in hand, for where they are needed first.
        """
        self._take(tail)
        for table, more, skipped in zip(self._tables, tail._tables, tail._gone, strict=True):
            if skipped:
                self._spare += more[skipped:]
            else:
                table += more
        self._spare += tail._spare

    def release(self) -> None:
        """Lets go of the blocks. A second release raises `LeaseReleased`."""
        pool = self._held()
        pool.expect(-self._expected)
        pool.let_go(self._by_place())
        self._pool = None
        self._expected = 0

    def _by_place(self) -> list[int]:
        """All blocks, the places in order: what is let go together is evicted from the ends of all tables."""
        if len(self._tables) == 1:
            return self.blocks
        named = list(zip(self._tables, self._gone, strict=True))
        longest = max(map(len, self._tables))
        placed = [t[place] for place in range(longest) for t, gone in named if gone <= place < len(t)]
        return placed + self._spare

    def _take(self, other: BlockLease) -> BlockPool:
        pool = self._held()
        assert other._held() is pool, "leases of one pool can be joined"
        pool.expect(-other._expected)
        other._pool, other._expected = None, 0
        return pool

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
        return f"BlockLease({len(self)} blocks, {state})"
