"""What to compute next. There are no phases: in every request `computed` chases `target`, and a step is a list of
chunks under a token budget. A decode is a chunk of one token, a prompt is as many as fit.

Pure: no clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.engine.finish import finish_reason
from paceline.engine.request import Chunk, EngineRequest, Progress, Sampled
from paceline.errors import NumericalError
from paceline.types import FinishReason, RequestId

DEFAULT_TOKEN_BUDGET = 512
"""Tokens a step computes at most: what one decode step may be delayed by, against how well the products are filled."""


class Scheduler:
    """Chooses batches, first come first served, and takes in what they sampled."""

    def __init__(self, *, token_budget: int, context_tokens: int, eos_token_ids: Collection[int]) -> None:
        if token_budget < 1:
            raise ValueError(f"a token budget of {token_budget} computes nothing")
        self.token_budget = token_budget
        self._context_tokens = context_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[RequestId, EngineRequest] = {}  # in order of service

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Iterable[EngineRequest]:
        """Those with work left, the next to be served first."""
        return self._requests.values()

    def knows(self, request_id: RequestId) -> bool:
        """True while the request has work left."""
        return request_id in self._requests

    def add(self, request: EngineRequest) -> None:
        """Takes a request in, behind the others."""
        self._requests[request.request_id] = request

    def remove(self, request_id: RequestId) -> EngineRequest | None:
        """Gives a request up, or None if it is not here."""
        return self._requests.pop(request_id, None)

    def next_batch(self) -> list[Chunk]:
        """The next step's chunks: first those one token short of sampling, then prompts in order, the last cut."""
        budget = self.token_budget
        short = [request for request in self._requests.values() if request.remaining == 1]
        batch = [Chunk(request, request.computed, 1) for request in short[:budget]]
        if len(short) > budget:
            self._to_the_back(chunk.request for chunk in batch)
        budget -= len(batch)
        for request in self._requests.values():
            if budget == 0:
                break
            if request.remaining > 1:
                num_tokens = min(request.remaining, budget)
                batch.append(Chunk(request, request.computed, num_tokens))
                budget -= num_tokens
        return batch

    def commit(self, batch: list[Chunk], sampled: Sampled) -> list[Progress]:
        """Enters a step's result: moves `computed`, appends tokens, and drops the requests that ended."""
        progress: list[Progress] = []
        entry = 0
        for chunk in batch:
            samples = chunk.samples
            chunk.request.computed = chunk.end
            if not samples:
                progress.append(Progress(chunk.request.request_id, (), chunk.end, ended=False))
                continue
            done = self._fail(chunk) if entry in sampled.bad else self._append(chunk, sampled.token_ids[entry])
            entry += 1
            if done.ended:
                del self._requests[done.request_id]
            progress.append(done)
        return progress

    def finish_reason(self, request: EngineRequest) -> FinishReason | None:
        """Why the request is over with its latest output token, or None."""
        return finish_reason(
            request.tokens[-1],
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            sampling=request.sampling,
            eos_token_ids=self._eos_token_ids,
            context_tokens=self._context_tokens,
        )

    def _append(self, chunk: Chunk, token_id: int) -> Progress:
        request = chunk.request
        request.tokens.append(token_id)
        reason = self.finish_reason(request)
        cut = request.stop_after is not None and request.num_output >= request.stop_after
        return Progress(request.request_id, (token_id,), chunk.end, reason is not None or cut, reason)

    def _fail(self, chunk: Chunk) -> Progress:
        request = chunk.request
        error = NumericalError(
            f"the logits at position {request.target} of request {request.request_id} are NaN or infinite"
        )
        return Progress(request.request_id, (), chunk.end, True, FinishReason.ERROR, error)

    def _to_the_back(self, served: Iterable[EngineRequest]) -> None:
        """More decodes than budget take turns."""
        for request in served:
            self._requests[request.request_id] = self._requests.pop(request.request_id)
