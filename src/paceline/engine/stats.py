"""What an engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.request import Chunk, Progress
from paceline.errors import NumericalError
from paceline.types import Work


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; they only grow, but for `spoilt_in_a_row`."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens_computed: int = 0  # for the first time
    tokens_recomputed: int = 0  # after a preemption
    output_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0  # prompt tokens of requests that got to sample here, each request once
    prefix_hit_tokens: int = 0  # of those, found in the cache
    spoilt_in_a_row: int = 0  # requests whose first logits here were unusable, since the last one whose were not

    @property
    def work(self) -> Work:
        """What of it others are told."""
        return Work(
            busy_s=self.step_seconds,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens_computed,
            generated_tokens=self.output_tokens,
        )

    def account(self, chunk: Chunk, reached: int, done: Progress) -> None:
        """Counts what a step did for a request, which had come as far as `reached` at most before."""
        request = chunk.request
        if chunk.start < request.num_prompt:
            computed = min(chunk.end, request.num_prompt) - max(chunk.start, reached)
            self.prompt_tokens_computed += max(0, computed)
        if chunk.start < reached:
            self.tokens_recomputed += min(chunk.end, reached) - chunk.start
        if done.token_ids:
            if not request.proposes:  # those proposed are counted once one is chosen
                self.output_tokens += len(done.token_ids)
            if not request.counted:
                request.counted = True
                self.prefix_queried_tokens += request.num_prompt
                self.prefix_hit_tokens += request.cached_tokens
        if chunk.samples and not request.judged:
            request.judged = True
            self.spoilt_in_a_row = self.spoilt_in_a_row + 1 if isinstance(done.error, NumericalError) else 0
        if done.ended:
            self.requests_failed += done.error is not None
            self.requests_finished += done.error is None
