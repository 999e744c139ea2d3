"""Who gets blocks of the pool: admission, growth, preemption, and what is left behind to be found again.

A request is admitted by its prompt and a little of its answer, under a watermark. What it needs beyond is not promised:
where a step finds no block, the last in rank is preempted, and comes back, before anyone new, once it fits again. So
nobody starves: the first in rank is never preempted for another, those behind it move up, and nobody comes in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.block_pool import BlockLease, BlockPool
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.scheduler import Scheduler
from paceline.prefix import BlockHash, block_hashes
from paceline.types import BLOCK_TOKENS, GROWTH_BLOCKS, RequestId, blocks_for


class Memory:
    """The pool's policy for one engine's requests. `watermark` is the share up to which new ones are admitted."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, *, watermark: float, caching: bool) -> None:
        self.caching = caching
        self.preemptions = 0
        self._pool = pool
        self._scheduler = scheduler
        self._admissible = int(watermark * pool.total)
        self._stalled = False  # somebody found no block for the last step, and nobody could be preempted for it
        self._stuck: tuple[int, int] | None = None  # the situation in which nothing of a step fitted

    @property
    def starving(self) -> bool:
        """True while somebody in hand has no block to go on with: nobody new may take one."""
        return self._stalled or self._scheduler.deprived

    @property
    def stuck(self) -> bool:
        """True while nothing fits that is to be computed: not before blocks come back, or requests come or go."""
        return self._stuck == self._situation

    @property
    def kept_blocks(self) -> int:
        """Blocks that a new request may not have beside others."""
        return self._pool.total if self.starving else self._pool.total - self._admissible

    def admit(self, prompt: Sequence[int], root: BlockHash | None, *, upfront: int, total: int) -> BlockLease | None:
        """A lease on `upfront` blocks of the `total` that a new request needs, or None where it has to wait.

        Blocks of `prompt` that are found under `root` are shared. Alone, a request may have all of the pool.
        """
        if self.starving:
            return None
        alone = not len(self._scheduler) and not self._pool.expected
        return self._lease(prompt, root, upfront, total, alone=alone)

    def resume(self) -> tuple[RequestId, ...]:
        """Gives blocks to those that were preempted, the first in rank first, and to none before it.

        Who has proposed and waits for others gives way where nothing else would ever be computed: its own blocks serve
        nobody before those others have got theirs. The names of those who did.
        """
        gave_way: list[RequestId] = []
        while self._scheduler.preempted:
            request = self._scheduler.preempted[0]
            upfront = blocks_for(len(request.tokens))
            total = max(upfront, blocks_for(request.stored_at_end))
            alone = not self._scheduler.running
            lease = self._lease(request.tokens, request.root, upfront, total, alone=alone)
            if lease is not None:
                request.begin(lease)
                self._scheduler.resume(request)
            elif self._scheduler.computes or (victim := self._scheduler.victim) is None:
                break
            else:
                self._preempt(victim, gave_way)
        return tuple(gave_way)

    def look_again(self) -> None:
        """Lets prompts that wait to be computed have what became findable since they came."""
        for request in self._scheduler.requests:
            shared, most = request.lease.shared, (request.num_prompt - 1) // BLOCK_TOKENS
            if request.root is None or request.begun or request.ahead or shared >= most:
                continue
            if not request.hashes:
                request.hashes = block_hashes(request.tokens, request.root, stop=most)
            if request.hashes[shared] in self._pool.cache:
                request.lease.adopt(self._pool.cache.find(request.hashes[:most]))
                request.begin(request.lease)
                request.cached_tokens = request.reached = request.computed

    def has_room(self, batch: list[Chunk]) -> bool:
        """True where there are blocks for all of the batch's tokens, and nobody has to give any up."""
        missing = sum(max(0, blocks_for(chunk.end) - len(chunk.request.lease)) for chunk in batch)
        return missing <= self._pool.free

    def make_room(self, batch: list[Chunk]) -> tuple[list[Chunk], tuple[RequestId, ...]]:
        """The chunks that have blocks for all of their tokens now, and who was preempted so that they have.

        Without room, no step may be in flight: whoever is preempted loses blocks that it would write to.
        """
        self._stalled = False
        preempted: list[RequestId] = []
        without: set[EngineRequest] = set()
        short = [chunk for chunk in batch if len(chunk.request.lease) < blocks_for(chunk.end)]
        for chunk in sorted(short, key=lambda chunk: chunk.request.rank):
            request, blocks = chunk.request, blocks_for(chunk.end)
            if request.preempted:
                continue
            if self._free(blocks - len(request.lease), request, preempted):
                request.lease.grow_to(blocks)
                request.lease.expect(min(request.growth, GROWTH_BLOCKS))
            elif not request.preempted:
                without.add(request)
                self._stalled = True
        fitting = [chunk for chunk in batch if not chunk.request.preempted and chunk.request not in without]
        assert all(map(self._writable, fitting)), "a block that others can find or hold is never written"
        # Where somebody gave way, another may go on with that.
        self._stuck = None if fitting or preempted else self._situation
        return fitting, tuple(preempted)

    def publish(self, request: EngineRequest) -> None:
        """Makes the request's full blocks findable: its logits were finite, and they depend on all that is stored."""
        full, start = request.computed // BLOCK_TOKENS, request.published
        if request.root is None or full <= start:
            return
        hashes = request.hashes
        parent = hashes[-1] if hashes else request.root
        hashes += block_hashes(request.tokens, parent, start=len(hashes), stop=full)
        before = hashes[start - 1] if start else None
        self._pool.publish(request.lease, hashes[start:full], start=start, parent=before)
        request.published = full

    @property
    def _situation(self) -> tuple[int, int]:
        """Changes whenever something may fit that did not."""
        return (self._pool.returns, self._scheduler.changes)

    def _lease(
        self, tokens: Sequence[int], root: BlockHash | None, upfront: int, total: int, *, alone: bool
    ) -> BlockLease | None:
        """The one admission: what is taken and what is expected stay under the watermark, unless it is alone."""
        prefix: list[int] = []
        if root is not None and self.caching and tokens:
            prefix = self._pool.cache.find(block_hashes(tokens, root, stop=(len(tokens) - 1) // BLOCK_TOKENS))
        count = upfront - len(prefix)
        expected = min(total - upfront, GROWTH_BLOCKS)
        cost = self._pool.cost(count, prefix)
        fits = self._pool.used + self._pool.expected + cost + expected <= self._admissible
        if cost > self._pool.free or not (fits or alone):
            return None
        return self._pool.lease(count, prefix=prefix, expected=expected)

    def _free(self, blocks: int, request: EngineRequest, preempted: list[RequestId]) -> bool:
        """Preempts until `blocks` are free; False where the request itself had to go, or nobody else is left."""
        while self._pool.free < blocks:
            victim = self._scheduler.victim
            if victim is None or (victim is request and self._scheduler.running == 1):
                return False
            self._preempt(victim, preempted)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: EngineRequest, preempted: list[RequestId]) -> None:
        victim.lose_blocks()
        self._scheduler.preempt(victim)
        self.preemptions += 1
        preempted.append(victim.request_id)

    def _writable(self, chunk: Chunk) -> bool:
        first = chunk.start // BLOCK_TOKENS
        blocks = chunk.request.lease.blocks[first : blocks_for(chunk.end)]
        return first >= chunk.request.published and all(self._pool.refs(block) == 1 for block in blocks)
