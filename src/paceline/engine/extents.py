"""Runs of consecutive block ids: neighbouring blocks travel as one piece, so runs are what the pool hands out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


class Extents:
    """A set of blocks as maximal runs: found by size for best fit, by either end for merging."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._by_size: list[tuple[int, int]] = []  # (length, start), ascending
        self._length_at: dict[int, int] = {}  # start -> length
        self._start_before: dict[int, int] = {}  # end (exclusive) -> start
        self.count = 0
        if num_blocks:
            self.put(0, num_blocks)

    @property
    def longest(self) -> int:
        """Length of the longest run; 0 where there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def run_from(self, start: int) -> int:
        """Length of the run that begins with this very block, else 0."""
        return self._length_at.get(start, 0)

    def run_until(self, end: int) -> int:
        """Length of the run that ends right before block `end`, else 0."""
        start = self._start_before.get(end)
        return 0 if start is None else end - start

    def put(self, start: int, length: int) -> None:
        """Adds a run, merged with its neighbours."""
        self.count += length
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
        self.count -= cut
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


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive ids, in the given order, as (start, length)."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
