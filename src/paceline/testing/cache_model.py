"""A pool and its prefix cache against a dictionary: any sequence of requests finds what is there, and nothing else.

The model keeps what each block of memory holds, as the tokens that it stands for, and a dictionary of what can be
found, built from the cache's own changes. Both must agree with every hit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from paceline.engine.block_pool import BlockLease, BlockPool
from paceline.prefix import ROOT, BlockHash, KvRemoved, KvStored, block_hashes
from paceline.types import BLOCK_TOKENS, blocks_for


@dataclass(slots=True, eq=False)
class _Request:
    tokens: list[int]
    lease: BlockLease
    hashes: list[BlockHash] = field(default_factory=list)


class CacheModel:
    """Random requests over one pool. `step` does one thing, and checks all that can be checked of it.

    Prompts begin with one of `families` beginnings, so that they have blocks in common, of up to `most_blocks` blocks.
    """

    def __init__(self, num_blocks: int, *, seed: int, families: int = 8, most_blocks: int = 12) -> None:
        self.pool = BlockPool(num_blocks)
        self.hits = 0  # blocks found
        self.asked = 0  # full blocks that were looked for
        self.evicted = 0
        self._chance = random.Random(seed)
        self._memory: list[tuple[int, ...] | None] = [None] * num_blocks  # the tokens up to each block's end
        self._findable: set[BlockHash] = set()
        self._live: list[_Request] = []
        self._beginnings = [
            self._chance.choices(range(1_000), k=most_blocks * BLOCK_TOKENS // 2) for _ in range(families)
        ]
        self._most_tokens = most_blocks * BLOCK_TOKENS

    def step(self) -> BlockLease | None:
        """One random operation; the lease of a request that came, if one did."""
        act = self._chance.random()
        came = None
        if act < 0.45:
            came = self._arrive()
        elif act < 0.75:
            self._leave()
        elif act < 0.98:
            self._grow()
        else:
            self._fail()
        self._follow_changes()
        self._check_books()
        return came

    def drain(self) -> None:
        """Ends every request; then all blocks are free."""
        while self._live:
            self._leave()
        self._follow_changes()
        assert self.pool.free == self.pool.total, f"{self.pool.free} of {self.pool.total} blocks came back"

    def _arrive(self) -> BlockLease | None:
        beginning = self._chance.choice(self._beginnings)
        shared = self._chance.randint(0, len(beginning))
        length = self._chance.randint(1, self._most_tokens - shared)
        tokens = beginning[:shared] + self._chance.choices(range(1_000), k=length)
        wanted = block_hashes(tokens, ROOT, stop=(len(tokens) - 1) // BLOCK_TOKENS)
        found = self.pool.cache.find(wanted)
        expected = next((i for i, each in enumerate(wanted) if each not in self._findable), len(wanted))
        assert len(found) == expected, f"{len(found)} blocks were found, and the dictionary has {expected}"
        for index, block in enumerate(found):
            prefix = tuple(tokens[: (index + 1) * BLOCK_TOKENS])
            assert self._memory[block] == prefix, f"block {block} was found for other tokens than it holds"
        count = blocks_for(len(tokens)) - len(found)
        if self.pool.cost(count, found) > self.pool.free:
            return None
        self.asked += len(wanted)
        self.hits += len(found)
        lease = self.pool.lease(count, prefix=found)
        request = _Request(tokens, lease, wanted[: len(found)])
        self._live.append(request)
        self._store(request, len(found))
        return lease

    def _grow(self) -> None:
        if not self._live:
            return
        request = self._chance.choice(self._live)
        tokens = request.tokens + self._chance.choices(range(1_000), k=self._chance.randint(1, BLOCK_TOKENS))
        more = blocks_for(len(tokens)) - len(request.lease)
        if more > self.pool.free:
            return
        first = len(request.tokens) // BLOCK_TOKENS
        request.tokens = tokens
        request.lease.grow_to(blocks_for(len(tokens)))
        self._store(request, first)

    def _store(self, request: _Request, first: int) -> None:
        """Writes the blocks from index `first` on, and publishes the full ones."""
        for index in range(first, len(request.lease)):
            block = request.lease.blocks[index]
            assert self.pool.refs(block) == 1, f"block {block} is written while others hold it"
            assert not self.pool.cache.holds(block), f"block {block} is written while it can be found"
            self._memory[block] = tuple(request.tokens[: (index + 1) * BLOCK_TOKENS])
        start, full = len(request.hashes), len(request.tokens) // BLOCK_TOKENS
        parent = request.hashes[-1] if request.hashes else ROOT
        new = block_hashes(request.tokens, parent, start=start, stop=full)
        self.pool.publish(request.lease, new, start=start, parent=request.hashes[-1] if start else None)
        request.hashes += new

    def _leave(self) -> None:
        if self._live:
            self._live.pop(self._chance.randrange(len(self._live))).lease.release()

    def _fail(self) -> None:
        if self._live:
            request = self._live.pop(self._chance.randrange(len(self._live)))
            self.pool.forget(request.lease.blocks)
            request.lease.release()

    def _follow_changes(self) -> None:
        for change in self.pool.cache.take_changes():
            match change:
                case KvStored(hashes=hashes):
                    assert not self._findable & set(hashes), "a hash was stored twice"
                    self._findable |= set(hashes)
                case KvRemoved(hashes=hashes):
                    assert self._findable >= set(hashes), "a hash was removed that was not there"
                    self._findable -= set(hashes)
                    self.evicted += len(hashes)

    def _check_books(self) -> None:
        pool = self.pool
        held = {block for request in self._live for block in request.lease.blocks}
        assert pool.used == len(held), f"{pool.used} blocks are used, and {len(held)} are held"
        assert len(pool.cache) == len(self._findable), "the cache and the dictionary differ in size"
        assert pool.cache.idle <= pool.free <= pool.total
