"""The engine: requests in, tokens out, over one model and one KV pool. It knows no network and no tier.

The life of a request here: `try_reserve` leases its first blocks, `add` puts it before the scheduler, `step` computes
it in chunks and samples, and at its end the blocks are freed, unless it holds them. A tier is a policy over this:
prefill adds with `hold` and `stop_after=1` and sends the blocks that each step reports as computed; decode adds with
`computed` where KV has landed.

On a device that computes beside the host, a step is launched before the one before it has told what it sampled: the
result comes a step later. Blocks that a step in flight may write to are not given away, and a step that wants somebody
preempted waits for the one in flight.

A full block becomes findable once a step that read it gave finite logits, and so never over tokens that are not final.
Where a step finds no block, a request is preempted: it waits, and is computed again from what is still found of it.

Single-threaded: one loop calls everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.block_pool import BlockLease, BlockPool
from paceline.engine.flights import Flight, Flights
from paceline.engine.intake import check_request
from paceline.engine.logits import Shaping
from paceline.engine.memory import Memory
from paceline.engine.request import Chunk, EngineRequest, Progress, StepOutput
from paceline.engine.runner import Runner, StepRunner
from paceline.engine.scheduler import DEFAULT_TOKEN_BUDGET, Scheduler
from paceline.engine.stats import EngineStats
from paceline.engine.weights import Weights
from paceline.errors import EngineError
from paceline.prefix import ROOT, BlockHash
from paceline.types import (
    BLOCK_TOKENS,
    Limits,
    RequestId,
    SamplingParams,
    WorkerLoad,
    blocks_for,
)


def _nothing() -> None:
    pass


class Engine:
    """Continuous batching over a paged KV pool of `num_blocks` blocks."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_blocks: int,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        prefix_cache: bool = True,
        watermark: float = 1.0,
        max_requests: int | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """`runner` has a pool of `num_blocks` blocks; by default one that computes steps as they are launched.

        A step has `token_budget` tokens and `max_requests` requests at most.

        `watermark` is the share of the pool up to which new requests are admitted beside others.
        """
        self.groups = KvGroups.of(config)
        self.pool = BlockPool(num_blocks, groups=len(self.groups))
        self.runner: StepRunner = Runner(config, weights, num_blocks=num_blocks) if runner is None else runner
        self.stats = EngineStats()
        self._scheduler = Scheduler(
            token_budget=token_budget,
            max_requests=max_requests,
            context_tokens=config.context_tokens,
            eos_token_ids=config.eos_token_ids,
        )
        self._eos_token_ids = config.eos_token_ids
        self._held: dict[RequestId, EngineRequest] = {}  # that ended and hold their blocks
        self._flights = Flights()
        self._slides = self.groups.windowed
        self._memory = Memory(
            self.pool,
            self._scheduler,
            watermark=watermark,
            caching=prefix_cache,
            groups=self.groups,
            depth=self.runner.depth,
        )
        self.limits = Limits(
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            pool_blocks=num_blocks,
            most_blocks=self._memory.most_blocks,
            batch_requests=max_requests or 0,
            step_weight_bytes=weights.step_nbytes,
            block_bytes=self.runner.block_bytes,
            windows=self.groups.windows,
        )

    @property
    def has_work(self) -> bool:
        """True while a step would compute something. Where nothing fits, that is not before blocks come back."""
        return bool(self._flights) or (len(self._scheduler) > 0 and not self._memory.stuck)

    @property
    def in_flight(self) -> bool:
        """True while the device computes: `step` has little to do before it is done."""
        return bool(self._flights)

    @property
    def launched(self) -> Sequence[Chunk]:
        """The chunks of the step that was launched last, while the device computes."""
        return self._flights.last.chunks if self._flights else ()

    @property
    def load(self) -> WorkerLoad:
        """The load now, but for what the engine can't know: quarantined blocks and the age of the loop's tick."""
        started = pending = 0
        for request in self._scheduler.requests:
            started += request.computed > 0
            if request.computed < request.num_prompt:
                pending += request.num_prompt - request.computed
        return WorkerLoad(
            running=started,
            waiting=len(self._scheduler) - started,
            pending_prompt_tokens=pending,
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            committed_blocks=self.pool.committed,
            kept_blocks=self._memory.kept_blocks,
            work=self.stats.work,
        )

    @property
    def occupancy(self) -> tuple[int, int]:
        """Tokens whose KV is stored for requests in hand, in each group, and slots of the blocks that they hold; shared
        ones once."""
        stored: dict[int, int] = {}
        spare = 0
        for request in self._scheduler.requests:
            spare += request.lease.spare
            for table, gone in zip(request.lease.tables, request.lease.gone, strict=True):
                for index in range(gone, len(table)):
                    filled = min(BLOCK_TOKENS, max(0, request.computed - index * BLOCK_TOKENS))
                    stored[table[index]] = max(filled, stored.get(table[index], 0))
        return sum(stored.values()), (len(stored) + spare) * BLOCK_TOKENS

    def try_reserve(
        self,
        num_tokens: int,
        *,
        upfront_tokens: int | None = None,
        prompt: Sequence[int] = (),
        root: BlockHash | None = ROOT,
    ) -> BlockLease | None:
        """A lease that holds blocks for `upfront_tokens` (all by default) and expects more, up to `num_tokens`.

        None when the pool does not admit it now; a request that is alone may have all of it. A request needs
        prompt + max_tokens - 1 tokens, since the last one's KV is never stored; one that stops after its first token
        needs its prompt. Full blocks of `prompt` that are cached under `root` are the lease's `shared` ones, at most
        those before the prompt's last token, which is always computed.
        """
        total = blocks_for(num_tokens)
        upfront = total if upfront_tokens is None else min(total, blocks_for(upfront_tokens))
        return self._memory.admit(prompt, root, upfront=upfront, total=total)

    def try_reserve_target(
        self, prompt: Sequence[int], num_tokens: int, *, root: BlockHash | None = ROOT
    ) -> tuple[BlockLease, BlockLease] | None:
        """As `try_reserve`, for a prompt that is computed elsewhere: what is found of it, and what is to be written.

        The second lease is `groups.missing` of the prompt, one group after the other. What is expected is the first
        one's. Once all is written, `join` makes one lease of them.
        """
        return self._memory.admit_target(prompt, root, total=blocks_for(num_tokens))

    def try_target(self, num_tokens: int, held_blocks: int) -> BlockLease | None:
        """Blocks to be written in place of others that a request had been admitted with and lost; None: not free."""
        return self._memory.target_again(num_tokens, held_blocks)

    def try_scratch(self, num_blocks: int) -> BlockLease | None:
        """Blocks for no tokens; None where they would keep a request out."""
        return self._memory.admit_scratch(num_blocks)

    def try_stock(self, lease: BlockLease, num_tokens: int) -> bool:
        """Takes what a lease that is to `hold` lacks to compute so many tokens; False where it is not free."""
        return self._memory.stock(lease, num_tokens)

    def add(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        lease: BlockLease,
        computed: int = 0,
        output: Sequence[int] = (),
        hold: bool = False,
        stop_after: int | None = None,
        priority: int = 0,
        root: BlockHash | None = ROOT,
        choice: int = 0,
        fanout: int = 1,
        counts: bool = True,
        proposes: bool = False,
    ) -> None:
        """Takes a validated request, and from now on owns its lease.

        `computed` tokens, or those of the lease's shared blocks, have their KV there already; `output` was sampled
        elsewhere and counts towards `max_tokens`. `stop_after` ends it after so many output tokens, whatever else. With
        `hold` its blocks are kept past its end, be it an abort, until `release`: its lease has all that it needs, and
        it is never preempted. Its blocks are cached under `root`, if any. `choice` keys its draws, as one of parallel
        samples; with `fanout`, which wants `hold` and `stop_after=1`, its one step of sampling draws the first token of
        each of so many choices. One that does not `counts` is a part of another that the statistics have. One that
        `proposes` draws nothing: it tells its `sampling.logprobs` likeliest next tokens and waits, with its blocks, for
        `extend`, or ends there where it holds; where all of its tokens are computed, they were told elsewhere. Raises
        `EngineError` for a request that contradicts itself: a fault of the caller.
        """
        computed = max(computed, lease.shared * BLOCK_TOKENS)
        request = EngineRequest(
            request_id, [*prompt, *output], len(prompt), sampling, lease, computed, hold, stop_after
        )
        request.choice, request.fanout, request.proposes = choice, fanout, proposes
        request.shaping = Shaping.of(sampling, prompt, self._eos_token_ids)
        request.scores = [] if sampling.prompt_logprobs is not None and computed == 0 else None
        request.priority = priority
        # A prompt that is to be scored is computed whole, whatever is cached.
        request.root = root if self._memory.caching and request.scores is None else None
        request.published = lease.shared
        request.cached_tokens = lease.shared * BLOCK_TOKENS
        request.reached = computed
        request.counted = request.judged = not counts
        if self._scheduler.knows(request_id) or request_id in self._held:
            raise EngineError(f"request {request_id} is here already")
        check_request(request, self._scheduler, self._memory, self.limits)
        self._scheduler.add(request)

    def extend(self, request_id: RequestId, token_id: int) -> None:
        """Tells a request that has proposed its next token, with which it goes on. Raises `EngineError` for another."""
        self._scheduler.go_on(self._proposer(request_id), token_id)
        self.stats.output_tokens += 1

    def branch(self, request_id: RequestId, branch_id: RequestId, token_id: int) -> None:
        """Starts a request that goes on by another token from where one has proposed, over the same full blocks.

        It has the other's rank. Where there is no block for its last one, it is computed again like one that was
        preempted. Raises `EngineError` as `extend` does.
        """
        parent = self._proposer(request_id)
        lease = self.pool.lease(0) if parent.preempted else self.fork(parent.lease, parent.computed)
        if not lease.blocks:
            lease.release()
        self._scheduler.enter(parent.branched(branch_id, token_id, lease))
        self.stats.output_tokens += 1

    def _proposer(self, request_id: RequestId) -> EngineRequest:
        request = self._scheduler.parked(request_id)
        if request is None:
            raise EngineError(f"request {request_id} has proposed nothing")
        return request

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request between two steps; no more is heard of it.

        False if there is none, or it has ended by itself.
        """
        request = self._scheduler.remove(request_id)
        if request is None:
            return False
        self.stats.requests_aborted += 1
        if not request.preempted:
            self._end(request)
        return True

    def release(self, request_id: RequestId) -> None:
        """Frees the blocks of a request that ended and holds them.

        Raises `EngineError` if there is none, or it still runs.
        """
        self._flights.let_go(self._take(request_id))

    def take(self, request_id: RequestId) -> BlockLease:
        """The blocks of a request that ended and holds them, for the caller to release. Raises as `release` does."""
        request = self._take(request_id)
        assert not request.ahead, "who is aborted releases what it holds"
        return request.lease

    def _take(self, request_id: RequestId) -> EngineRequest:
        request = self._held.pop(request_id, None)
        if request is None:
            raise EngineError(f"request {request_id} holds no blocks past its end")
        return request

    def fork(self, lease: BlockLease, num_tokens: int) -> BlockLease:
        """Another lease on the KV of the first `num_tokens` tokens in `lease`.

        Full blocks are shared, and the last one, partly filled, is copied. Empty where the pool has no block for that:
        the tokens are then to be computed again.
        """
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        count = self.pool.groups if rest else 0
        if count > self.pool.free:
            return self.pool.lease(0)
        forked = lease.share(full)
        if rest:
            forked.extend(1)
            for source, target in zip(lease.tables, forked.tables, strict=True):
                self.runner.copy_block(source[full], target[full])
        return forked

    def step(self, tick: Callable[[], None] = _nothing) -> StepOutput:
        """Computes the next batch, or launches it and tells what the one before it did.

        `tick` is called between layers, or while the device is waited for, so that transfers go on during a long step.
        Where the device computes and there is nothing to launch beside it, returns at once with nothing.
        """
        retired = None
        if self._flights and self._flights.first.goes_alone:
            retired = self._retire(tick)
        gave_way = self._memory.resume()
        self._memory.look_again()
        batch = self._scheduler.next_batch()
        if self._flights and not self._memory.has_room(batch):
            retired = self._retire(tick)
            batch = self._scheduler.next_batch()
        batch, preempted = self._memory.make_room(batch)
        preempted = gave_way + preempted
        self.stats.preemptions = self._memory.preemptions
        if batch:
            self._launch(batch, tick)
        if retired is None and self._flights:
            due = len(self._flights) > self.runner.depth if batch else self._flights.first.step.done
            retired = self._retire(tick) if due else None
        return StepOutput(preempted=preempted) if retired is None else replace(retired, preempted=preempted)

    def _launch(self, batch: list[Chunk], tick: Callable[[], None]) -> None:
        began = time.perf_counter()
        step = self.runner.launch(batch, tick)
        self._scheduler.launch(batch)
        self._flights.add(Flight(batch, step, began))

    def _retire(self, tick: Callable[[], None]) -> StepOutput:
        """Takes in the result of the step that was launched first, waiting for it with ticks."""
        flight = self._flights.wait(tick)
        live = [chunk for chunk in flight.chunks if not chunk.request.ended]
        reached = [chunk.request.reached for chunk in live]  # before it
        progress = self._scheduler.commit(flight.chunks, flight.step.result())
        for chunk, before, done in zip(live, reached, progress, strict=True):
            self.stats.account(chunk, before, done)
            self._take_in(chunk.request, done)
        seconds = self._flights.retired(flight)
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        return StepOutput(progress, sum(chunk.num_tokens for chunk in live), seconds=seconds)

    def _take_in(self, request: EngineRequest, done: Progress) -> None:
        if done.token_ids:
            self._memory.publish(request)
        if done.ended:
            if done.error is not None:
                self._memory.forget(request)
            self._end(request)
        if self._slides and not request.lease.released:
            self._memory.slide(request)

    def _end(self, request: EngineRequest) -> None:
        if request.hold:
            self._held[request.request_id] = request
        else:
            self._flights.let_go(request)
