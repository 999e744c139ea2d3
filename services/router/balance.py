"""How many workers of each tier suit the requests of late: an estimate from what the workers measured of themselves.

Pure. A prefill worker's speed is its prompt tokens over its busy time. A decode worker generates the faster the more
requests share a step, and an idle tier shows small batches alone: so the time of a step is fitted as a line over its
batch, and read off at the largest batch that its pool holds. That is far beyond batches that were small: the estimate
is the better the more the tier has had to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from paceline.types import Limits, Role, Work, blocks_in_groups

MEMORY_S: Final = 60.0
"""Busy time after which what an engine did counts 1/e of what it does now."""

MEMORY_REQUESTS: Final = 512
"""Likewise requests, of the mean request."""

_TELLING: Final = 0.02
"""Least variance of the batch, over its squared mean, from which a line is fitted: less of it is noise."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate. Rates are those of one worker, a second."""

    prompt_tokens: float  # of the mean request, to be computed
    generated_tokens: float  # of the mean request
    prefill_tokens_per_s: float  # while it computes
    decode_tokens_per_s: float  # with `batch_requests` in its batch
    batch_requests: float
    step_s: float  # of a decode step, without its requests
    step_per_request_s: float

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers that keep one decode worker busy."""
        prompts_per_s = self.decode_tokens_per_s / self.generated_tokens
        return prompts_per_s * self.prompt_tokens / self.prefill_tokens_per_s


class Pace:
    """What the reports of one engine say of its speed; later ones count more."""

    def __init__(self, work: Work) -> None:
        self._last = work
        self.busy_s = self.prompt_tokens = 0.0  # of prompts, on a prefill worker
        # Of decode steps: their number, the sums of their batches and times, of squares and products.
        self.steps = self.batch = self.time_s = self.batch_squared = self.batch_time_s = 0.0

    def take(self, work: Work) -> None:
        """What the engine has done by now; an earlier report that comes late is left out."""
        steps, busy_s = work.steps - self._last.steps, work.busy_s - self._last.busy_s
        if steps <= 0 or busy_s <= 0:
            return
        prompt_tokens = work.prompt_tokens - self._last.prompt_tokens
        generated = work.generated_tokens - self._last.generated_tokens
        self._last = work
        fading = math.exp(-busy_s / MEMORY_S)
        self.busy_s = fading * self.busy_s + busy_s
        self.prompt_tokens = fading * self.prompt_tokens + prompt_tokens
        # Steps that compute prompts besides tell nothing of those that only decode.
        told = not prompt_tokens
        batch, step_s = generated / steps, busy_s / steps
        self.steps = fading * self.steps + told * steps
        self.batch = fading * self.batch + told * steps * batch
        self.time_s = fading * self.time_s + told * steps * step_s
        self.batch_squared = fading * self.batch_squared + told * steps * batch**2
        self.batch_time_s = fading * self.batch_time_s + told * steps * batch * step_s


class MeanRequest:
    """The tokens of requests that ended well; later ones count more."""

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._generated_tokens = 0.0

    def take(self, *, prompt_tokens: int, generated_tokens: int) -> None:
        """One more: its prompt's tokens that nobody had in a cache, and its answer's."""
        fading = 1 - 1 / MEMORY_REQUESTS
        self._requests = fading * self._requests + 1
        self._prompt_tokens = fading * self._prompt_tokens + prompt_tokens
        self._generated_tokens = fading * self._generated_tokens + generated_tokens

    @property
    def tokens(self) -> tuple[float, float] | None:
        """Of the prompt and of the answer; None before the first request has ended."""
        if not self._requests:
            return None
        return self._prompt_tokens / self._requests, self._generated_tokens / self._requests


def balance(mean: MeanRequest, workers: Iterable[tuple[Role, Limits, Pace]]) -> Balance | None:
    """The estimate over all workers; None before each tier has computed, and a request has ended."""
    every = list(workers)
    prefill = [pace for role, _, pace in every if role is Role.PREFILL]
    decode = [(limits, pace) for role, limits, pace in every if role is Role.DECODE]
    busy_s, prompt_tokens = sum(pace.busy_s for pace in prefill), sum(pace.prompt_tokens for pace in prefill)
    tokens = mean.tokens
    if tokens is None or not all(tokens) or not prompt_tokens or not any(pace.batch for _, pace in decode):
        return None
    full = min(_full_batch(limits, *tokens) for limits, _ in decode)
    step_s, per_request_s, seen = _line([pace for _, pace in decode])
    batch = seen if per_request_s is None else max(1.0, full)
    per_request_s = per_request_s or 0.0
    return Balance(
        prompt_tokens=tokens[0],
        generated_tokens=tokens[1],
        prefill_tokens_per_s=prompt_tokens / busy_s,
        decode_tokens_per_s=batch / (step_s + per_request_s * batch),
        batch_requests=batch,
        step_s=step_s,
        step_per_request_s=per_request_s,
    )


def _full_batch(limits: Limits, prompt_tokens: float, generated_tokens: float) -> float:
    blocks = blocks_in_groups(math.ceil(prompt_tokens + generated_tokens), limits.most_blocks)
    fitting = limits.pool_blocks / blocks
    return min(fitting, limits.batch_requests) if limits.batch_requests else fitting


def _line(paces: list[Pace]) -> tuple[float, float | None, float]:
    """A step's time without requests, what each adds (None: the batches were too much alike), and the mean batch."""
    steps = sum(pace.steps for pace in paces)
    batch, time_s = sum(pace.batch for pace in paces) / steps, sum(pace.time_s for pace in paces) / steps
    variance = sum(pace.batch_squared for pace in paces) / steps - batch**2
    if variance < _TELLING * batch**2:
        return time_s, None, batch
    slope = (sum(pace.batch_time_s for pace in paces) / steps - batch * time_s) / variance
    slope = min(max(0.0, slope), time_s / batch)  # neither a request nor an empty step takes less than no time
    return time_s - slope * batch, slope, batch
