"""Which blocks can be found by their content's hash, and which of them nobody holds: those are evictable, oldest first.

A block is in the index from its publication until it is evicted or forgotten, whether a lease holds it or not. One that
nobody holds counts as free; it keeps its content until the pool takes it back. Of one chain the end is older than the
beginning, so that what is left of it can still be found.

A hash has a block in each KV group. What is told of changes is the first group's: one hash for each block of tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from paceline.prefix import HASH_BYTES, BlockHash, KvChange, KvRemoved, KvStored

_Key: TypeAlias = bytes
"""A block's hash, and behind it the number of its KV group unless that is the first."""


class PrefixCache:
    """The index of one pool::

    idle blocks are a subset of the indexed ones      each hash has one block a group, each block at most one hash
    """

    def __init__(self) -> None:
        self._block_of: dict[_Key, int] = {}
        self._hash_of: dict[int, _Key] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> when it was let go; the oldest first
        self._clock = 0
        self._changes: list[KvChange] = []

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def __contains__(self, key: BlockHash) -> bool:
        """True where a block of this content can be found."""
        return key in self._block_of

    def holds(self, block: int) -> bool:
        """True for a block that can be found."""
        return block in self._hash_of

    @property
    def idle(self) -> int:
        """Blocks that can be found and that nobody holds."""
        return len(self._idle)

    @property
    def changed(self) -> bool:
        """True while `take_changes` has something to tell."""
        return bool(self._changes)

    def find(self, hashes: Sequence[BlockHash], *, group: int = 0) -> list[int]:
        """The blocks of a chain's beginning, as far as it is here."""
        found: list[int] = []
        for each in hashes:
            block = self._block_of.get(_key(each, group))
            if block is None:
                break
            found.append(block)
        return found

    def get(self, each: BlockHash, group: int) -> int | None:
        """The block of one hash, if it is here."""
        return self._block_of.get(_key(each, group))

    def publish(
        self, blocks: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash | None, *, group: int = 0
    ) -> None:
        """Makes held blocks, a chain behind `parent`, findable. A hash that is here already keeps its block."""
        added: list[BlockHash] = []
        for block, each in zip(blocks, hashes, strict=True):
            key = _key(each, group)
            if key in self._block_of or block in self._hash_of:
                self._tell_stored(parent, added)
                parent, added = each, []
                continue
            self._block_of[key] = block
            self._hash_of[block] = key
            if group == 0:
                added.append(each)
        self._tell_stored(parent, added)

    def forget(self, blocks: Iterable[int]) -> list[int]:
        """Makes blocks unfindable, held or not; returns those of them that were idle, which are nobody's now."""
        removed: list[BlockHash] = []
        freed: list[int] = []
        for block in blocks:
            each = self._hash_of.pop(block, None)
            if each is None:
                continue
            del self._block_of[each]
            if len(each) == HASH_BYTES:
                removed.append(each)
            if self._idle.pop(block, None) is not None:
                freed.append(block)
        if removed:
            self._changes.append(KvRemoved(tuple(removed)))
        return freed

    def let_go(self, block: int) -> bool:
        """Nobody holds the block any more: it is idle from now on, the newest. False where it can not be found."""
        if block not in self._hash_of:
            return False
        self._clock += 1
        self._idle[block] = self._clock
        return True

    def hold(self, block: int) -> None:
        """Somebody holds the block again, if it was idle."""
        self._idle.pop(block, None)

    def is_idle(self, block: int) -> bool:
        """True for a block that can be found and that nobody holds."""
        return block in self._idle

    def oldest(self) -> Iterator[int]:
        """Idle blocks, the one that was let go first in front. The index must not change meanwhile."""
        return iter(self._idle)

    def age(self, block: int) -> int | None:
        """When an idle block was let go, smaller being earlier; None for any other block."""
        return self._idle.get(block)

    @property
    def old_age(self) -> int:
        """The age up to which a block counts as old: all but the last quarter of the time since the oldest's."""
        oldest = next(iter(self._idle.values()), self._clock)
        return oldest + (self._clock - oldest) * 3 // 4

    def take_changes(self) -> tuple[KvChange, ...]:
        """What has changed since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def _tell_stored(self, parent: BlockHash | None, hashes: list[BlockHash]) -> None:
        if hashes:
            self._changes.append(KvStored(parent, tuple(hashes)))


def _key(each: BlockHash, group: int) -> _Key:
    return each if group == 0 else each + group.to_bytes(2, "little")
