"""What to compute next. There are no phases: in every request `computed` chases `target`, and a step is a list of
chunks under a token budget. A decode is a chunk of one token, a prompt is as many as fit.

When the pool runs out of blocks, the request of the lowest priority, of those the latest, is preempted: it waits apart,
keeps its tokens, and computes them again. So the first in rank always goes on, and every request becomes the first.

Pure: no clock, no I/O, no torch.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection, Iterable, Sequence

from paceline.engine.finish import finish_reason
from paceline.engine.request import Chunk, EngineRequest, Progress, Sampled
from paceline.errors import NumericalError
from paceline.types import FinishReason, RequestId, TokenLogprob

DEFAULT_TOKEN_BUDGET = 512
"""Tokens a step computes at most: what one decode step may be delayed by, against how well the products are filled."""


class Scheduler:
    """Chooses batches, first come first served, and takes in what they sampled."""

    def __init__(
        self,
        *,
        token_budget: int,
        context_tokens: int,
        eos_token_ids: Collection[int],
        max_requests: int | None = None,
    ) -> None:
        """A batch has `token_budget` tokens at most, of `max_requests` requests at most."""
        if token_budget < 1:
            raise ValueError(f"a token budget of {token_budget} computes nothing")
        self.token_budget = token_budget
        self.max_requests = token_budget if max_requests is None else max_requests
        self._context_tokens = context_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[RequestId, EngineRequest] = {}  # in order of service
        self._preempted: list[EngineRequest] = []  # the first in rank in front
        self._parked: dict[RequestId, EngineRequest] = {}  # have proposed their next tokens
        self._arrivals = itertools.count(1)
        self.changes = 0
        """How often requests came, went, or changed sides."""

    def __len__(self) -> int:
        """Requests that have not ended, whether they have blocks or not."""
        return len(self._requests) + len(self._preempted) + len(self._parked)

    @property
    def requests(self) -> Iterable[EngineRequest]:
        """Those with blocks, the next to be served first."""
        return itertools.chain(self._requests.values(), self._parked_with_blocks)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._requests) + sum(1 for _ in self._parked_with_blocks)

    @property
    def computes(self) -> bool:
        """True while one with blocks has something to compute."""
        return bool(self._requests)

    @property
    def deprived(self) -> bool:
        """True while somebody's blocks are taken away."""
        return bool(self._preempted) or any(request.preempted for request in self._parked.values())

    @property
    def preempted(self) -> Sequence[EngineRequest]:
        """Those that wait for blocks to go on, the first in rank in front: it is the next to get some."""
        return self._preempted

    @property
    def victim(self) -> EngineRequest | None:
        """Who is preempted next: of the lowest priority the latest. Never one whose blocks others may be reading."""
        able = (request for request in self.requests if not request.hold)
        # Of one rank, who waits for others is better spared than who is waited for.
        return max(able, key=lambda request: (request.rank, request.request_id in self._parked), default=None)

    def knows(self, request_id: RequestId) -> bool:
        """True while the request has not ended."""
        found = request_id in self._requests or request_id in self._parked
        return found or any(each.request_id == request_id for each in self._preempted)

    def add(self, request: EngineRequest) -> None:
        """Takes a request in, behind the others. One with nothing to compute has proposed its next tokens elsewhere."""
        request.arrival = next(self._arrivals)
        (self._requests if request.remaining else self._parked)[request.request_id] = request
        self.changes += 1

    def parked(self, request_id: RequestId) -> EngineRequest | None:
        """The request, where it has proposed its next tokens and waits to be told which it is."""
        return self._parked.get(request_id)

    def go_on(self, request: EngineRequest, token_id: int) -> None:
        """Tells a parked request its next token."""
        del self._parked[request.request_id]
        request.tokens.append(token_id)
        self.enter(request)

    def enter(self, request: EngineRequest) -> None:
        """Takes a request in at the place that its rank has, with those preempted where it has no blocks."""
        if request.preempted:
            insort(self._preempted, request, key=lambda each: each.rank)
        else:
            self._requests[request.request_id] = request
        self.changes += 1

    def remove(self, request_id: RequestId) -> EngineRequest | None:
        """Gives a request up, or None if it is not here. What steps in flight do for it means nothing any more."""
        self.changes += 1
        request = self._requests.pop(request_id, None) or self._parked.pop(request_id, None)
        if request is None:
            request = next((each for each in self._preempted if each.request_id == request_id), None)
            if request is not None:
                self._preempted.remove(request)
        if request is not None:
            request.ended = True
        return request

    def preempt(self, request: EngineRequest) -> None:
        """Takes a request out of service until `resume`; its blocks are gone. A parked one needs none until `go_on`."""
        if self._requests.pop(request.request_id, None) is not None:
            insort(self._preempted, request, key=lambda each: each.rank)
        self.changes += 1

    def resume(self, request: EngineRequest) -> None:
        """Takes a preempted request, which has blocks again, back into service."""
        self._preempted.remove(request)
        self._requests[request.request_id] = request
        self.changes += 1

    def next_batch(self) -> list[Chunk]:
        """The next step's chunks: first those one token short of sampling, then prompts in order, the last cut."""
        budget = self.token_budget
        short: list[EngineRequest] = []
        prompts: list[EngineRequest] = []
        for request in self._requests.values():
            remaining = request.remaining
            if remaining and (not request.pending or self._goes_on(request)):
                (short if remaining == 1 else prompts).append(request)
        # One place is a prompt's, however many decodes there are: they would never let it begin.
        places = self.max_requests - (1 if prompts and self.max_requests > 1 else 0)
        batch = [Chunk(request, request.scheduled, 1) for request in short[: min(budget, places)]]
        budget -= len(batch)
        for request in sorted(prompts, key=lambda request: request.rank):
            if budget == 0 or len(batch) == self.max_requests:
                break
            num_tokens = min(request.remaining, budget)
            batch.append(Chunk(request, request.scheduled, num_tokens))
            budget -= num_tokens
        return batch

    def launch(self, batch: Sequence[Chunk]) -> None:
        """Notes that a step computes the batch, until `commit`."""
        for chunk in batch:
            chunk.launched()
        if len(batch) >= min(self.token_budget, self.max_requests) - 1:
            # Maybe there are more decodes than places: those served go to the back, so that all take turns.
            for chunk in batch:
                self._requests[chunk.request.request_id] = self._requests.pop(chunk.request.request_id)

    def commit(self, batch: Sequence[Chunk], sampled: Sampled) -> list[Progress]:
        """Enters a launched step's result: moves `computed`, appends tokens, and drops the requests that ended.

        Of requests that ended while the step was in flight nothing is reported.
        """
        progress: list[Progress] = []
        entry = 0
        for index, score in sampled.scores:
            if (scores := batch[index].request.scores) is not None:
                scores.append(score)
        for chunk in batch:
            chunk.retired()
            request = chunk.request
            first, entry = entry, entry + (request.fanout if chunk.samples else 0)
            if request.ended:
                continue
            if not chunk.samples:
                progress.append(Progress(request.request_id, (), chunk.end, ended=False))
                continue
            done = self._fail(chunk) if first in sampled.bad else self._append(chunk, sampled, first)
            if done.ended:
                request.ended = True
                del self._requests[done.request_id]
                self.changes += 1
            elif request.proposes:
                self._parked[done.request_id] = self._requests.pop(done.request_id)
                self.changes += 1
            progress.append(done)
        return progress

    def finish_reason(self, request: EngineRequest) -> FinishReason | None:
        """Why the request is over with its latest output token, or None."""
        return self._reason(request, request.tokens[-1], num_output=request.num_output)

    def _goes_on(self, request: EngineRequest) -> bool:
        """True where a request whose latest token is in flight goes on, unless by that token it ends.

        One that shapes its logits must know the tokens before the one to draw, and one that proposes is not told yet.
        """
        if request.shaping is not None or request.proposes:
            return False
        target = request.target
        return target < self._context_tokens and target - request.num_prompt < request.outputs_allowed

    def _reason(self, request: EngineRequest, token_id: int, *, num_output: int) -> FinishReason | None:
        return finish_reason(
            token_id,
            num_prompt=request.num_prompt,
            num_output=num_output,
            sampling=request.sampling,
            eos_token_ids=self._eos_token_ids,
            context_tokens=self._context_tokens,
        )

    def _append(self, chunk: Chunk, sampled: Sampled, entry: int) -> Progress:
        if chunk.request.proposes:
            return self._propose(chunk, sampled, entry)
        if chunk.request.fanout > 1:
            return self._fan_out(chunk, sampled, entry)
        request, token_id = chunk.request, sampled.token_ids[entry]
        request.tokens.append(token_id)
        num_output = len(request.tokens) - request.num_prompt
        reason = self._reason(request, token_id, num_output=num_output)
        cut = request.stop_after is not None and num_output >= request.stop_after
        logprob = sampled.logprobs[entry] if sampled.logprobs else None
        return Progress(
            request.request_id,
            (token_id,),
            chunk.end,
            ended=reason is not None or cut,
            finish_reason=reason,
            logprobs=() if logprob is None else (logprob,),
            prompt_logprobs=tuple(request.scores or ()) if num_output == 1 else (),
        )

    def _fan_out(self, chunk: Chunk, sampled: Sampled, entry: int) -> Progress:
        """The first token of each choice. The request is done: what goes on is a request of its own, elsewhere."""
        request, entries = chunk.request, slice(entry, entry + chunk.request.fanout)
        token_ids = tuple(sampled.token_ids[entries])
        finishes = tuple(self._reason(request, token_id, num_output=1) for token_id in token_ids)
        return Progress(
            request.request_id,
            token_ids,
            chunk.end,
            ended=True,
            finish_reason=None if None in finishes else finishes[-1],
            logprobs=tuple(each for each in sampled.logprobs[entries] if each is not None),
            prompt_logprobs=tuple(request.scores or ()),
            finishes=finishes,
        )

    def _propose(self, chunk: Chunk, sampled: Sampled, entry: int) -> Progress:
        """The likeliest next tokens, the best first. Whoever holds is done; another waits to be told which it is."""
        request, found = chunk.request, sampled.logprobs[entry]
        assert found is not None, "one that proposes asks for log-probabilities"
        return Progress(
            request.request_id,
            tuple(token_id for token_id, _ in found.top),
            chunk.end,
            ended=request.hold,
            logprobs=tuple(TokenLogprob(token_id, logprob) for token_id, logprob in found.top),
            prompt_logprobs=() if request.num_output else tuple(request.scores or ()),
        )

    def _fail(self, chunk: Chunk) -> Progress:
        request = chunk.request
        error = NumericalError(
            f"the logits at position {chunk.end} of request {request.request_id} are NaN or infinite"
        )
        return Progress(request.request_id, (), chunk.end, True, FinishReason.ERROR, error)

    @property
    def _parked_with_blocks(self) -> Iterable[EngineRequest]:
        return (request for request in self._parked.values() if not request.preempted)
