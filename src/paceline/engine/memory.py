"""Who gets blocks of the pool: admission, growth, preemption, and what is left behind to be found again.

A request is admitted by its prompt and a little of its answer, under a watermark. What it needs beyond is not promised:
where a step finds no block, the last in rank is preempted, and comes back, before anyone new, once it fits again. So
nobody starves: the first in rank is never preempted for another, those behind it move up, and nobody comes in between.

Groups with a window let go of what has slid out after each step. So a request needs no more of their blocks at once
than a window and a step's tokens fill, and for a prompt that is computed here just those are in hand from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline.checkpoint.kv_groups import KvGroups, one_group
from paceline.engine.block_pool import BlockLease, BlockPool, Hit
from paceline.engine.prefix_hits import find_hit
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.scheduler import Scheduler
from paceline.prefix import BlockHash, block_hashes
from paceline.types import BLOCK_TOKENS, GROWTH_BLOCKS, RequestId, blocks_for


class Memory:
    """The pool's policy for one engine's requests. `watermark` is the share up to which new ones are admitted.

    Sizes of requests are in blocks of tokens; what they come to in blocks of the pool depends on the model's `groups`.
    """

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        watermark: float,
        caching: bool,
        groups: KvGroups | None = None,
        depth: int = 0,
    ) -> None:
        """`depth` is how many steps may be in flight when another is planned. Without `groups` there is one, without a
        window.
        """
        self.caching = caching
        self.preemptions = 0
        self._pool = pool
        self._scheduler = scheduler
        self._groups = one_group(1) if groups is None else groups
        # What the steps in flight read has not been let go of when another gets its blocks.
        self._most = self._groups.most_blocks(scheduler.token_budget * (1 + depth))
        self._settled = self._groups.most_blocks(1)
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

    @property
    def most_blocks(self) -> tuple[int | None, ...]:
        """Of each group the most blocks that a request has at once; None: one for each 16 tokens."""
        return self._most

    def admit(self, prompt: Sequence[int], root: BlockHash | None, *, upfront: int, total: int) -> BlockLease | None:
        """A lease that holds `upfront` of the `total` places that a new request needs, or None where it has to wait.

        Blocks of `prompt` that are found under `root` are shared. Alone, a request may have all of the pool.
        """
        return None if self.starving else self._lease(prompt, root, upfront, total, alone=self._alone)

    def admit_target(
        self, prompt: Sequence[int], root: BlockHash | None, *, total: int
    ) -> tuple[BlockLease, BlockLease] | None:
        """As `admit`, for a prompt that is computed elsewhere: what is found, and apart from it what is to be written.

        Of groups with a window that is what the prompt's next token reads.
        """
        if self.starving:
            return None
        expected = self._growth(blocks_for(len(prompt)), total)
        for hit in self._hits(prompt, root):
            missing = self._groups.missing(len(prompt), hit.reach)
            counts = [len(places) for places in missing]
            if self._fits(self._pool.cost(sum(counts), hit.blocks), expected, alone=self._alone):
                held = self._pool.open(hit, [0] * len(counts), expected=expected)
                return held, self._target(missing, hit.reach)
        return None

    def target_again(self, num_tokens: int, held_blocks: int) -> BlockLease | None:
        """Blocks to be written in place of those that a request was admitted with and lost; None: they are not free."""
        missing = self._groups.missing(num_tokens, held_blocks)
        return self._target(missing, held_blocks) if sum(map(len, missing)) <= self._pool.free else None

    def admit_scratch(self, num_blocks: int) -> BlockLease | None:
        """Blocks that no table names, if there is room for them as for a new request."""
        if self.starving or not self._fits(num_blocks, 0, alone=self._alone):
            return None
        return self._pool.open(Hit.none(self._pool.groups), [0] * self._pool.groups, spare=num_blocks)

    def stock(self, lease: BlockLease, num_tokens: int) -> bool:
        """Takes in hand what `lease` needs to compute so many tokens in steps; False where that isn't free."""
        needed = self.needed_spare(lease, blocks_for(num_tokens))
        if needed - lease.spare > self._pool.free:
            return False
        lease.stock(needed)
        return True

    def holds(self, lease: BlockLease, reach: int) -> bool:
        """True where `lease` will never ask for a block up to `reach`."""
        tables = zip(lease.tables, self._most, strict=True)
        return self.needed_spare(lease, reach) <= lease.spare and all(len(t) >= reach for t, most in tables if not most)

    def needed_spare(self, lease: BlockLease, reach: int) -> int:
        """Blocks in hand with which groups with a window get to `reach`, given anew what slides out."""
        lengths = zip(lease.tables, self._most, strict=True)
        return sum(min(max(0, reach - len(table)), most) for table, most in lengths if most is not None)

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
            if request.begun or request.ahead or request.root is None:
                continue
            shared, most = request.lease.shared, (request.num_prompt - 1) // BLOCK_TOKENS
            if shared >= most:
                continue
            if not request.hashes:
                request.hashes = block_hashes(request.tokens, request.root, stop=most)
            if request.hashes[shared] not in self._pool.cache:
                continue
            hit = find_hit(self._pool.cache, request.hashes[:most], self._groups)
            if hit.reach > shared:
                request.lease.adopt(hit)
                request.lease.trim(self.needed_spare(request.lease, blocks_for(request.num_prompt)))
                request.begin(request.lease)
                request.cached_tokens = request.reached = request.computed

    def has_room(self, batch: list[Chunk]) -> bool:
        """True where there are blocks for all of the batch's tokens, and nobody has to give any up."""
        missing = 0
        for chunk in batch:
            missing += chunk.request.lease.lacking(blocks_for(chunk.end))
        return missing <= self._pool.free

    def make_room(self, batch: list[Chunk]) -> tuple[list[Chunk], tuple[RequestId, ...]]:
        """The chunks that have blocks for all of their tokens now, and who was preempted so that they have.

        Without room, no step may be in flight: whoever is preempted loses blocks that it would write to.
        """
        self._stalled = False
        preempted: list[RequestId] = []
        without: set[EngineRequest] = set()
        short = [chunk for chunk in batch if chunk.request.lease.reach < blocks_for(chunk.end)]
        for chunk in sorted(short, key=lambda chunk: chunk.request.rank):
            request, blocks = chunk.request, blocks_for(chunk.end)
            if request.preempted:
                continue
            if self._free(request.lease.lacking(blocks), request, preempted):
                request.lease.grow_to(blocks)
                request.lease.expect(self._growth(blocks, blocks_for(request.stored_at_end)))
            elif not request.preempted:
                without.add(request)
                self._stalled = True
        fitting = batch
        if without or preempted:
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
        self._publish(request, range(self._pool.groups), full)
        request.published = full

    def slide(self, request: EngineRequest) -> None:
        """Lets go of what no token behind the stored ones reads. What it is promised, it gets anew."""
        first, gone = self._groups.first_read(request.computed), request.lease.gone
        if all(now <= before for now, before in zip(first, gone, strict=True)):
            return
        # A hit wants the groups without a window too, and those are published by their logits. Where there are none,
        # what slides out before the first logits is never found.
        if request.root is not None and self._groups.windows[0] is None:
            windowed = [group for group, window in enumerate(self._groups.windows) if window is not None]
            self._publish(request, windowed, request.computed // BLOCK_TOKENS)
        stock = self.needed_spare(request.lease, blocks_for(request.stored_at_end)) if request.hold else 0
        request.lease.slide(first, stock=stock)

    def forget(self, request: EngineRequest) -> None:
        """Makes all that the request has, or had, unfindable: any of it may hold what made its logits unusable."""
        self._pool.forget(request.lease.blocks)
        if self._groups.windowed:
            groups = range(self._pool.groups)
            had = [self._pool.cache.get(each, group) for each in request.hashes for group in groups]
            self._pool.forget(block for block in had if block is not None)

    def _publish(self, request: EngineRequest, groups: Iterable[int], full: int) -> None:
        """The blocks of these groups from those that all have published on."""
        hashes, start = request.hashes, request.published
        parent = hashes[-1] if hashes else request.root
        assert parent is not None, "what has no root is not published"
        hashes += block_hashes(request.tokens, parent, start=len(hashes), stop=full)
        before = hashes[start - 1] if start else None
        for group in groups:
            self._pool.publish_group(request.lease, group, hashes[start:full], start=start, parent=before)

    @property
    def _situation(self) -> tuple[int, int]:
        """Changes whenever something may fit that did not."""
        return (self._pool.returns, self._scheduler.changes)

    def _lease(
        self, tokens: Sequence[int], root: BlockHash | None, upfront: int, total: int, *, alone: bool
    ) -> BlockLease | None:
        """The one admission: what is taken and what is expected stay under the watermark, unless it is alone."""
        expected = self._growth(upfront, total)
        for hit in self._hits(tokens, root):
            left = upfront - hit.reach
            counts = [left if most is None else 0 for most in self._most]
            spare = sum(min(left, most) for most in self._most if most is not None)
            if self._fits(self._pool.cost(sum(counts) + spare, hit.blocks), expected, alone=alone):
                return self._pool.open(hit, counts, spare=spare, expected=expected)
        return None

    @property
    def _alone(self) -> bool:
        return not len(self._scheduler) and not self._pool.expected

    def _hits(self, tokens: Sequence[int], root: BlockHash | None) -> Iterator[Hit]:
        """What is found of the tokens; and then nothing, where a window's blocks may cost more found than computed."""
        nothing = Hit.none(self._pool.groups)
        if root is None or not self.caching or not tokens:
            yield nothing
            return
        hashes = block_hashes(tokens, root, stop=(len(tokens) - 1) // BLOCK_TOKENS)
        hit = find_hit(self._pool.cache, hashes, self._groups)
        yield hit
        if hit.reach and self._groups.windowed:
            yield nothing

    def _fits(self, cost: int, expected: int, *, alone: bool) -> bool:
        fits = self._pool.used + self._pool.expected + cost + expected <= self._admissible
        return cost <= self._pool.free and (fits or alone)

    def _target(self, missing: Sequence[range], held: int) -> BlockLease:
        skipped = [places.start - held for places in missing]
        return self._pool.open(Hit.none(self._pool.groups), list(map(len, missing)), skipped=skipped)

    def _growth(self, reach: int, total: int) -> int:
        """Blocks that a request with places up to `reach` is likely to ask for next, where it may need `total`."""
        more = max(0, min(total - reach, GROWTH_BLOCKS))
        return sum(more if most is None else min(more, max(0, most - reach)) for most in self._settled)

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
        request, first, end = chunk.request, chunk.start // BLOCK_TOKENS, blocks_for(chunk.end)
        if first < request.published:
            return False
        for table in request.lease.tables:
            for block in table[first:end]:
                if self._pool.refs(block) != 1:
                    return False
        return True
