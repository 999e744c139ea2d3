"""The engine: requests in, tokens out, over one model and one KV pool. It knows no network and no tier.

The life of a request here: `try_reserve` promises its blocks, `add` puts it before the scheduler, `step` computes it
in chunks and samples, and at its end the blocks are freed, unless it holds them. A tier is a policy over this: prefill
adds with `hold` and `stop_after=1` and sends the blocks that each step reports as computed; decode adds with
`computed` where KV has landed.

Single-threaded: one loop calls everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.block_pool import BlockLease, BlockPool, PoolExhausted
from paceline.engine.logits import Shaping
from paceline.engine.request import Chunk, EngineRequest, Progress, StepOutput
from paceline.engine.runner import Runner
from paceline.engine.scheduler import DEFAULT_TOKEN_BUDGET, Scheduler
from paceline.engine.weights import Weights
from paceline.errors import EngineError
from paceline.types import Limits, RequestId, SamplingParams, WorkerLoad, blocks_for


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; they only grow."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0


def _nothing() -> None:
    pass


class Engine:
    """Continuous batching over a paged KV pool of `num_blocks` blocks."""

    def __init__(
        self, config: ModelConfig, weights: Weights, *, num_blocks: int, token_budget: int = DEFAULT_TOKEN_BUDGET
    ) -> None:
        self.limits = Limits(vocab_size=config.vocab_size, context_tokens=config.context_tokens, pool_blocks=num_blocks)
        self.pool = BlockPool(num_blocks)
        self.runner = Runner(config, weights, num_blocks=num_blocks)
        self.stats = EngineStats()
        self._scheduler = Scheduler(
            token_budget=token_budget, context_tokens=config.context_tokens, eos_token_ids=config.eos_token_ids
        )
        self._eos_token_ids = config.eos_token_ids
        self._held: dict[RequestId, BlockLease] = {}  # of requests that ended and were to hold

    @property
    def has_work(self) -> bool:
        """True while a step would compute something."""
        return len(self._scheduler) > 0

    @property
    def load(self) -> WorkerLoad:
        """The load now, but for what the engine can't know: quarantined blocks and the age of the loop's tick."""
        started = sum(request.computed > 0 for request in self._scheduler.requests)
        return WorkerLoad(
            running=started,
            waiting=len(self._scheduler) - started,
            pending_prompt_tokens=sum(
                max(0, request.num_prompt - request.computed) for request in self._scheduler.requests
            ),
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            committed_blocks=self.pool.committed,
        )

    def try_reserve(self, num_tokens: int, *, upfront_tokens: int | None = None) -> BlockLease | None:
        """A lease that holds blocks for `upfront_tokens` (all by default) and promises them up to `num_tokens`.

        None when the pool cannot promise as much now. A request needs prompt + max_tokens - 1 tokens, since the last
        one's KV is never stored; one that stops after its first token needs its prompt.
        """
        total = blocks_for(num_tokens)
        upfront = total if upfront_tokens is None else min(total, blocks_for(upfront_tokens))
        try:
            return self.pool.lease(upfront, promise=total - upfront)
        except PoolExhausted:
            return None

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
    ) -> None:
        """Takes a validated request, and from now on owns its lease.

        `computed` tokens have their KV in the lease's blocks already; `output` was sampled elsewhere and counts towards
        `max_tokens`. `stop_after` ends it after so many output tokens, whatever else. With `hold` its blocks are kept
        past its end, be it an abort, until `release`. Raises `EngineError` for a request that contradicts itself: a
        fault of the caller.
        """
        request = EngineRequest(
            request_id, [*prompt, *output], len(prompt), sampling, lease, computed, hold, stop_after
        )
        request.shaping = Shaping.of(sampling, prompt, self._eos_token_ids)
        self._check(request)
        self._scheduler.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request between two steps; no more is heard of it.

        False if there is none, or it has ended by itself.
        """
        request = self._scheduler.remove(request_id)
        if request is None:
            return False
        self.stats.requests_aborted += 1
        self._end(request)
        return True

    def release(self, request_id: RequestId) -> None:
        """Frees the blocks of a request that ended and holds them.

        Raises `EngineError` if there is none, or it still runs.
        """
        lease = self._held.pop(request_id, None)
        if lease is None:
            raise EngineError(f"request {request_id} holds no blocks past its end")
        lease.release()

    def step(self, tick: Callable[[], None] = _nothing) -> StepOutput:
        """Computes the next batch; `tick` is called between layers, so that transfers go on during a long step."""
        batch = self._scheduler.next_batch()
        if not batch:
            return StepOutput()
        began = time.perf_counter()
        for chunk in batch:
            chunk.request.lease.grow_to(blocks_for(chunk.end))
        sampled = self.runner.run(batch, tick)
        progress = self._scheduler.commit(batch, sampled)
        self._account(batch, progress)
        self.stats.step_seconds += time.perf_counter() - began
        return StepOutput(progress, sum(chunk.num_tokens for chunk in batch))

    def _account(self, batch: list[Chunk], progress: list[Progress]) -> None:
        self.stats.steps += 1
        for chunk, done in zip(batch, progress, strict=True):
            self.stats.prompt_tokens_computed += max(0, min(chunk.end, chunk.request.num_prompt) - chunk.start)
            self.stats.output_tokens += len(done.token_ids)
            if done.ended:
                self.stats.requests_failed += done.error is not None
                self.stats.requests_finished += done.error is None
                self._end(chunk.request)

    def _end(self, request: EngineRequest) -> None:
        if request.hold:
            self._held[request.request_id] = request.lease
        else:
            request.lease.release()

    def _check(self, request: EngineRequest) -> None:
        """Refuses what would fail in the middle of a batch and take the neighbours with it."""
        name = f"request {request.request_id}"
        last_output = request.sampling.max_tokens if request.stop_after is None else request.stop_after
        stored = request.num_prompt + min(last_output, request.sampling.max_tokens) - 1
        if self._scheduler.knows(request.request_id) or request.request_id in self._held:
            raise EngineError(f"{name} is here already")
        if not 0 <= request.computed < len(request.tokens) or request.num_prompt == 0:
            raise EngineError(
                f"{name} has {request.computed} of {len(request.tokens)} tokens computed: nothing to sample from"
            )
        if request.num_output and (self._scheduler.finish_reason(request) or request.num_output >= last_output):
            raise EngineError(f"{name} has ended with the output it came with")
        if request.lease.capacity < blocks_for(stored) or len(request.lease.blocks) < blocks_for(request.computed):
            raise EngineError(f"{name} needs {blocks_for(stored)} KV blocks and was lent {request.lease.capacity}")
