"""A request inside the engine, and what a step says of it: what the scheduler decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.block_pool import BlockLease
from paceline.engine.logits import Shaping
from paceline.errors import EngineError
from paceline.types import FinishReason, RequestId, SamplingParams


@dataclass(slots=True, eq=False)
class EngineRequest:
    """The state of one request: `computed` chases `target`, which grows by each sampled token.

    ::

        0 <= computed <= target = len(tokens)      num_prompt <= len(tokens)

    `computed` counts the tokens whose KV is stored; the step in which it reaches `target` samples the next token.
    """

    request_id: RequestId
    tokens: list[int]  # prompt, then output
    num_prompt: int
    sampling: SamplingParams
    lease: BlockLease
    computed: int = 0
    hold: bool = False  # keep the blocks after the end, until they are released by name
    stop_after: int | None = None  # end after so many output tokens, whatever else
    choice: int = 0  # which of its caller's parallel samples
    shaping: Shaping | None = None  # what it asks of its logits

    @property
    def target(self) -> int:
        """Tokens whose KV must be stored before the next token can be sampled."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, here or elsewhere."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's share of one step: the `num_tokens` tokens from `start` on."""

    request: EngineRequest
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens stored once the step is done."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True when the chunk reaches the request's last token, and so yields the next."""
        return self.end == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the runner sampled: one entry for each chunk of the batch that samples, in the batch's order."""

    token_ids: Sequence[int]
    bad: frozenset[int] = frozenset()  # entries whose logits were NaN or infinite; their token means nothing


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one request."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # sampled in this step
    computed: int  # tokens, from the prompt's first, whose KV is stored now
    ended: bool  # the engine is done with it
    finish_reason: FinishReason | None = None  # None with `ended`: `stop_after` cut it, and it goes on elsewhere
    error: EngineError | None = None  # with FinishReason.ERROR


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did, in the order of its batch. Empty when there was nothing to do."""

    progress: list[Progress] = field(default_factory=list)
    num_tokens: int = 0  # computed in this step
