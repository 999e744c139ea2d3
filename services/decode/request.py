"""What a decode worker knows of a live request beside its reservation's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.block_pool import BlockLease
from paceline.errors import PacelineError
from paceline.prefix import BlockHash
from paceline.services.decode.beams import LiveSearch
from paceline.services.decode.choices import Choice
from paceline.types import BLOCK_TOKENS, FinishReason, SamplingParams


@dataclass(slots=True)
class LiveRequest:
    """One request, from its reservation to its end."""

    prompt: list[int]
    sampling: SamplingParams
    priority: int
    root: BlockHash | None  # what the prompt is cached under; None: it is computed whole
    lease: BlockLease | None = None
    """The prompt's beginning that was cached, which nobody writes to, and what the answer is expected to need. The
    blocks behind it are the reservation's, until the engine gets both as one lease."""
    held_blocks: int = 0  # of 16 tokens, whose KV is here as far as what comes behind them reads it
    missing_blocks: int = 0  # of all KV groups, that a prefill worker is to write
    search: LiveSearch | None = None  # once its beams are the engine's
    given: BlockLease | None = None  # the lease, once the engine has it
    choices: list[Choice] = field(default_factory=list)
    local: bool = False  # the prompt is computed here
    counted: bool = False  # the cache's statistics have it
    prompt_tokens_computed: int = 0
    attempts: int = 1
    blocks_landed: int = 0
    parts_landed: int = 0
    first_part_at: float | None = None
    landed_at: float | None = None
    finish: FinishReason | None = None
    error: PacelineError | None = None

    @property
    def told(self) -> int:
        """Output tokens that the front has, of all choices."""
        return sum(choice.told for choice in self.choices)

    @property
    def prompt_alone(self) -> bool:
        """Several choices are to share the prompt, and what runs, if anything does, is that prompt. Its blocks are
        held past its end."""
        return len(self.choices) > 1 and self.told == 0 and self.sampling.beam_width is None

    @property
    def shares_prompt(self) -> bool:
        """Its prompt is computed once, and held for its choices to share."""
        return self.sampling.n > 1 and self.sampling.beam_width is None

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV is stored at the end; the last one's never is."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def joined(self, blocks: BlockLease, *, filled: bool) -> BlockLease:
        """All of its blocks, as the engine takes them: with the prompt's KV in them, or for it."""
        assert self.lease is not None, "a request is given to the engine once"
        lease, self.lease = self.lease, None
        if filled:
            lease.join(blocks)
        else:
            lease.take_in(blocks)
        self.given = lease
        return lease

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were cached. Where it is computed here, more may have been found by its turn."""
        given = self.given.shared if self.given is not None and self.local else 0
        return max(self.held_blocks, given) * BLOCK_TOKENS
