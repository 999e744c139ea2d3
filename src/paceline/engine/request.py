"""A request inside the engine, and what a step says of it: what the scheduler decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paceline.engine.block_pool import BlockLease
from paceline.engine.logits import Shaping
from paceline.errors import EngineError
from paceline.prefix import ROOT, BlockHash
from paceline.types import BLOCK_TOKENS, FinishReason, RequestId, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class EngineRequest:
    """The state of one request: `computed` chases `target`, which grows by each sampled token.

    ::

        0 <= computed <= scheduled = computed + ahead <= target = len(tokens) + pending      num_prompt <= len(tokens)

    `computed` counts the tokens whose KV is stored; the step in which it reaches `target` samples the next token. Steps
    in flight will have stored `ahead` more, and will have sampled `pending` tokens that nobody knows yet.
    """

    request_id: RequestId
    tokens: list[int]  # prompt, then output
    num_prompt: int
    sampling: SamplingParams
    lease: BlockLease
    computed: int = 0
    hold: bool = False  # keep the blocks after the end, until they are released by name
    stop_after: int | None = None  # end after so many output tokens, whatever else
    priority: int = 0  # the lowest is preempted first
    root: BlockHash | None = ROOT  # what its blocks are known under; None: they are never cached
    arrival: int = 0  # counts up; given by the scheduler
    cached_tokens: int = 0  # of the prompt, found in the cache when it came
    hashes: list[BlockHash] = field(default_factory=list)  # of its full blocks, as far as they were needed
    published: int = 0  # blocks, from the first, that the cache was told of
    reached: int = 0  # most tokens whose KV was ever stored; what is computed below is computed again
    counted: bool = False  # the cache's statistics have it
    judged: bool = False  # whether its first logits here were usable is known
    choice: int = 0  # which of its caller's parallel samples
    fanout: int = 1  # choices whose first tokens its prompt's end gives; over 1 only where it ends with them
    proposes: bool = False  # tells its likeliest next tokens, and waits to be told which it is, in place of a draw
    shaping: Shaping | None = None  # what it asks of its logits
    scores: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on; None: not asked for
    ahead: int = 0  # tokens that the steps in flight compute
    pending: int = 0  # tokens that they sample
    ended: bool = False  # finished, failed or aborted; what steps in flight still do for it means nothing

    @property
    def target(self) -> int:
        """Tokens whose KV must be stored before the next token can be sampled."""
        return len(self.tokens) + self.pending

    @property
    def scheduled(self) -> int:
        """Tokens whose KV is stored, or will be by the steps in flight."""
        return self.computed + self.ahead

    @property
    def remaining(self) -> int:
        """Tokens still to schedule before the next can be sampled; 1 while decoding."""
        return len(self.tokens) + self.pending - self.computed - self.ahead

    @property
    def outputs_allowed(self) -> int:
        """Output tokens with which it ends at the latest, but for the context's end."""
        most = self.sampling.max_tokens
        return most if self.stop_after is None else min(most, self.stop_after)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all: the smallest is served first and preempted last."""
        return (-self.priority, self.arrival)

    @property
    def preempted(self) -> bool:
        """True while its blocks are taken away, until it gets others and computes its tokens again."""
        return self.lease.released

    @property
    def begun(self) -> bool:
        """True once something of it was computed, here or elsewhere, and not found."""
        return len(self.tokens) > self.num_prompt or self.reached > self.cached_tokens

    @property
    def stored_at_end(self) -> int:
        """Tokens whose KV is stored at its end, at most. The last sampled token's never is."""
        return self.num_prompt + self.outputs_allowed - 1

    def lose_blocks(self) -> None:
        """Gives them back, with no step in flight. What it has sampled, and told, stays; all else is computed again."""
        assert not self.ahead, f"{self.request_id} is being computed"
        self.lease.release()
        self.computed = 0
        self.scores = None if self.scores is None or self.num_output else []

    def begin(self, lease: BlockLease) -> None:
        """Takes other blocks, of which the shared ones hold its first tokens already."""
        self.lease = lease
        self.published = lease.shared
        self.computed = lease.shared * BLOCK_TOKENS

    def branched(self, request_id: RequestId, token_id: int, lease: BlockLease) -> EngineRequest:
        """One that goes on from here by another token. `lease` is a fork of this one's, or released: then it is to be
        computed from its beginning.
        """
        return replace(
            self,
            request_id=request_id,
            tokens=[*self.tokens, token_id],
            lease=lease,
            computed=0 if lease.released else self.computed,
            hashes=list(self.hashes),
            published=lease.shared,
            scores=None,
            counted=True,
            judged=True,
        )

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, here or elsewhere."""
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True, eq=False)
class Chunk:
    """A request's share of one step: the `num_tokens` tokens from `start` on. Nothing of it changes.

    It isn't declared frozen, since that makes it thrice as dear, and one is made for each request and step.
    """

    request: EngineRequest
    start: int
    num_tokens: int
    end: int = field(init=False)  # tokens stored once the step is done
    samples: bool = field(init=False)  # it reaches the request's last token as planned, and so yields the next

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens
        # Kept, since the target moves on while the step is in flight.
        self.samples = self.end == self.request.target

    def launched(self) -> None:
        """The step that it is a part of is in flight."""
        self.request.ahead += self.num_tokens
        self.request.pending += self.samples

    def retired(self) -> None:
        """The step is over: its KV is stored, and the token that it sampled is for the caller to append."""
        request, end = self.request, self.end
        request.ahead -= self.num_tokens
        request.pending -= self.samples
        request.computed = end
        if end > request.reached:
            request.reached = end


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the runner sampled: an entry for each chunk of the batch that samples, in the batch's order; for one that
    fans out an entry for each choice.
    """

    token_ids: Sequence[int]
    bad: frozenset[int] = frozenset()  # entries whose logits were NaN or infinite; their token means nothing
    logprobs: Sequence[TokenLogprob | None] = ()  # of each entry, where any was asked for
    scores: Sequence[tuple[int, TokenLogprob]] = ()  # of prompt tokens: which chunk's, in order


class Progress(msgspec.Struct, frozen=True):
    """What a step did for one request."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # sampled in this step; of a fan-out the first of each choice; or the ones proposed
    computed: int  # tokens, from the prompt's first, whose KV is stored now
    ended: bool  # the engine is done with it
    finish_reason: FinishReason | None = None  # None with `ended`: `stop_after` cut it, and it goes on elsewhere
    error: EngineError | None = None  # with FinishReason.ERROR
    logprobs: tuple[TokenLogprob, ...] = ()  # of `token_ids`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token, where they were asked for
    finishes: tuple[FinishReason | None, ...] = ()  # of a fan-out: what each of `token_ids` means to its choice


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did, in the order of its batch. Empty when there was nothing to do."""

    progress: list[Progress] = field(default_factory=list)
    num_tokens: int = 0  # computed in this step
    preempted: tuple[RequestId, ...] = ()  # lost their blocks, behind it or before; they come back by themselves
    seconds: float = 0.0  # for which nothing but it was awaited
