"""One request's beam search before the engine: each beam is a request of its own there, over shared full blocks.

A beam proposes its next tokens and waits, with its blocks, until all have. Then the search goes a token further: who
is dropped gives its blocks back, and of the beams that come from one, the first goes on in its place and the others
branch off. In the meantime any of them may have been preempted, as any request may.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.engine.beams import BeamSearch, Hypothesis, Move
from paceline.engine.engine import Engine
from paceline.types import RequestId, ReservationId, SamplingParams, TokenLogprob


class LiveSearch:
    """The beams of one request. The first is the prompt, which is the caller's to add to the engine as `names[0]`."""

    def __init__(
        self, engine: Engine, reservation: ReservationId, sampling: SamplingParams, eos_token_ids: Collection[int]
    ) -> None:
        self._engine = engine
        self._search = BeamSearch(sampling, eos_token_ids)
        self.names = tuple(RequestId(f"{reservation}#{number}") for number in range(self._search.width))
        """What the engine may know its beams by."""
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        """Of a prompt that is computed here, once they are known."""
        self._running = [self.names[0]]  # in the search's order
        self._proposed: dict[RequestId, Sequence[TokenLogprob]] = {}

    @property
    def over(self) -> bool:
        """True once `hypotheses` are the answers, and the engine runs nothing of it."""
        return self._search.over

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The best finished ones, the best first."""
        return self._search.finished

    def propose(self, name: RequestId, proposals: Sequence[TokenLogprob]) -> None:
        """Takes what a beam proposes, the best first, and goes on where it is the last to."""
        self._proposed[name] = proposals
        if len(self._proposed) == len(self._running):
            self._go_on(self._search.advance([self._proposed[each] for each in self._running]))
            self._proposed.clear()

    def abort(self) -> None:
        """Ends all beams."""
        for name in self._running:
            self._engine.abort(name)
        self._running = []

    def _go_on(self, moves: Sequence[Move]) -> None:
        before = self._running
        kept = {before[move.parent] for move in moves}
        for name in before:
            if name not in kept:
                self._engine.abort(name)
        free = [name for name in self.names if name not in kept]
        extended: dict[RequestId, int] = {}
        self._running = []
        for move in moves:
            name = before[move.parent]
            if name in extended:
                name = free.pop(0)
                self._engine.branch(before[move.parent], name, move.token_id)
            else:
                extended[name] = move.token_id
            self._running.append(name)
        for name, token_id in extended.items():  # last, since nothing branches off from what has gone on
            self._engine.extend(name, token_id)
