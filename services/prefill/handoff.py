"""One attempt to hand one prompt's KV over: blocks that the engine has finished become writes into the target's pool.

Where writes follow the device's work in stream order, blocks are posted as the step that fills them is launched: the
prompt's last ones are on their way then while its first token is sampled and seen.

Nothing is posted before the claim is granted, and nothing after the attempt is cut. Source blocks stay the engine's,
held, until every handle is terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from paceline.checkpoint.kv_groups import KvGroups
from paceline.engine.block_pool import BlockLease
from paceline.errors import TransferFailed
from paceline.kvtransfer.outgoing import Outgoing, OutgoingState
from paceline.services.prefill.messages import Attempt
from paceline.types import BLOCK_TOKENS, RequestId, TokenLogprob, blocks_for

KEEP_ALIVE_S: Final = 2.5
"""Longest silence of a live writer. The target gives a writer up after four times as long, so that it tells a stopped
writer from one whose prompt waits its turn."""


UNCLAIMED_S: Final = 60.0
"""Seconds for which a computed prompt waits for its claim; whoever made it gives up earlier."""


class Handoff:
    """The state of an attempt::

    0 <= finished <= blocks of the prompt        a block being 16 tokens, whatever their KV groups
    0 <= posted <= max(finished, being filled)
    """

    def __init__(
        self,
        attempt: Attempt,
        num_prompt: int,
        lease: BlockLease,
        groups: KvGroups,
        *,
        release: Callable[[], None],
        in_engine: bool = True,
    ) -> None:
        self.attempt = attempt
        self.num_prompt = num_prompt
        self.request_id = RequestId(str(attempt))
        self.release = release
        """Gives the source blocks back; to be called once, when `terminal`."""
        self.in_engine = in_engine
        """The engine still computes it."""
        self.outgoing: Outgoing | None = None
        self.parts_before_last_chunk = 0
        self._lease = lease
        self._groups = groups
        self._wanted = groups.missing(num_prompt, 0)  # places of each group's table that the target lacks
        self._target_tables: Sequence[Sequence[int]] = ()  # for those places
        self._finished = lease.shared  # cached blocks are sent as any others
        self._being_filled = 0  # blocks that are finished once all that was launched is done
        self._posted = 0
        self._parts = 0
        self._first_tokens: tuple[int, ...] | None = None
        self._first_logprobs: tuple[TokenLogprob, ...] = ()
        self._cut = False
        self._spoke_at = 0.0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt's beginning that were in the cache."""
        return self._lease.shared * BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        """Blocks to hand over in all."""
        return sum(map(len, self._wanted))

    @property
    def terminal(self) -> bool:
        """True when the engine is done with it, and no write is under way or will be."""
        if self.in_engine:
            return False
        return self._cut if self.outgoing is None else self.outgoing.terminal

    @property
    def give_up_at(self) -> float | None:
        """When a computed prompt that nobody claimed is let go, in monotonic seconds: nothing was posted."""
        unclaimed = self.outgoing is None and self._first_tokens is not None and not self._cut
        return self._spoke_at + UNCLAIMED_S if unclaimed else None

    @property
    def failed(self) -> bool:
        """True where the transport gave a write up, and not we."""
        return not self._cut and self.outgoing is not None and self.outgoing.state is OutgoingState.FAILED

    @property
    def keep_alive_at(self) -> float | None:
        """When the target must hear of us again, in monotonic seconds; None where it awaits nothing."""
        waiting = self.outgoing is not None and self._first_tokens is None and not self._cut
        return self._spoke_at + KEEP_ALIVE_S if waiting else None

    def check_target(self, target_blocks: Sequence[int], held_tokens: int) -> None:
        """Raises TransferFailed for a grant that does not fit the prompt: the two calls were of different prompts."""
        expected = sum(map(len, self._groups.missing(self.num_prompt, held_tokens // BLOCK_TOKENS)))
        if held_tokens >= self.num_prompt or len(target_blocks) != expected:
            raise TransferFailed(
                f"{len(target_blocks)} blocks were granted, and {held_tokens} tokens are held, for a prompt of "
                f"{self.num_prompt} tokens: the reservation is another prompt's"
            )

    def grant(self, outgoing: Outgoing, target_blocks: Sequence[int], held_tokens: int, now: float) -> None:
        """The claim succeeded: posts what is finished by now."""
        self.outgoing = outgoing
        self._wanted = self._groups.missing(self.num_prompt, held_tokens // BLOCK_TOKENS)
        rest = iter(target_blocks)  # one group after the other
        self._target_tables = [list(islice(rest, len(places))) for places in self._wanted]
        self._posted = min(places.start for places in self._wanted)
        self._spoke_at = now
        self._post(now)

    @property
    def parts(self) -> int:
        """Of those that hold blocks: posted, and the one that is still to come, if any."""
        return self._parts + (self._posted < blocks_for(self.num_prompt))

    def launched(self, num_tokens: int, now: float) -> None:
        """The KV of so many prompt tokens is stored once all that was launched is done; 0: that is none of its steps,
        or not its steps alone.
        """
        self._being_filled = self._full_blocks(num_tokens)
        if self._being_filled > self._posted:
            self._post(now)

    def computed(self, num_tokens: int, now: float) -> None:
        """The KV of so many prompt tokens is stored: their full blocks can go."""
        self._finished = min(num_tokens, self.num_prompt) // BLOCK_TOKENS
        self._post(now)

    def sampled(self, first_tokens: Sequence[int], first_logprobs: Sequence[TokenLogprob], now: float) -> None:
        """The prompt is whole and its first tokens are known, one a choice: the rest goes, with them."""
        self._finished = blocks_for(self.num_prompt)
        self._first_tokens, self._first_logprobs = tuple(first_tokens), tuple(first_logprobs)
        self._spoke_at = max(self._spoke_at, now)
        self._post(now)

    def chunk_begins(self) -> None:
        """A step is about to compute more of it: what had arrived before the last one is what overlap hides."""
        if self.outgoing is not None and self.in_engine:
            self.parts_before_last_chunk = self.outgoing.stats.parts

    def keep_alive(self, now: float) -> None:
        """An empty part, which says that the writer lives."""
        if self.outgoing is not None and self._first_tokens is None:
            self.outgoing.write_part((), ())
            self._spoke_at = now

    def cut(self, reason: str) -> None:
        """Posts nothing more."""
        self._cut = True
        if self.outgoing is not None:
            self.outgoing.abort(reason)

    def _post(self, now: float) -> None:
        if self.outgoing is None or self._cut:
            return
        source, target = self._due(self._finished)
        if self._first_tokens is not None:
            self.outgoing.finish(source, target, self._first_tokens, self._first_logprobs)
        elif source:
            self.outgoing.write_part(source, target)
            self._spoke_at = now
        if self.outgoing.in_stream:
            # Apart, for what is finished must not wait for what is being filled.
            source, target = self._due(self._being_filled)
            if source:
                self.outgoing.write_part(source, target, in_stream=True)
                self._spoke_at = now

    def _due(self, reach: int) -> tuple[list[int], list[int]]:
        """Blocks before `reach` that are not posted, and where they go; from now on they are."""
        source: list[int] = []
        target: list[int] = []
        for table, places, targets in zip(self._lease.tables, self._wanted, self._target_tables, strict=True):
            # What the target holds, or will not read, is passed over; the prompt's last block is never among it.
            begin, end = max(self._posted, places.start), min(reach, places.stop)
            if begin < end:
                source += table[begin:end]
                target += targets[begin - places.start : end - places.start]
        self._parts += bool(source)
        self._posted = max(self._posted, reach)
        return source, target

    def _full_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill; the prompt's last one counts when it holds all that it ever will."""
        return blocks_for(self.num_prompt) if num_tokens >= self.num_prompt else num_tokens // BLOCK_TOKENS
