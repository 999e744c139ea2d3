"""How many workers of each tier suit the requests of late: an estimate from what the workers measured of themselves.

Pure. A prefill worker's speed is its prompt tokens over its busy time. A decode worker generates the faster the more
requests share a step, and an idle tier shows small batches alone: so the time of a step is fitted as a line over its
batch, and read off at the largest batch that its pool holds. Where the batches seen were much alike, the line's slope
is what bytes say: a step reads the weights once, and each request's KV. The line goes far beyond batches that were
small: the estimate is the better the more the tier has had to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from paceline.types import BLOCK_TOKENS, Limits, Role, Work, blocks_in_groups

SECONDS: Final = 10
"""What is remembered: the latest seconds in which there was anything to remember, however long ago."""

_TELLING: Final = 0.02
"""Variance of the batch, over its squared mean, at which a fitted slope is worth as much as that which bytes say. Where
these are not told, no line is fitted to less: it would be noise."""


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


class Recent:
    """Sums over the latest seconds in which something came, of `size` values each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seconds: deque[tuple[int, list[float]]] = deque(maxlen=SECONDS)

    def add(self, values: Sequence[float], *, now: float) -> None:
        """Adds them to what came in the same second."""
        second = math.floor(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0.0] * self._size))
        sums = self._seconds[-1][1]
        for place, value in enumerate(values):
            sums[place] += value

    @property
    def sums(self) -> list[float]:
        """Over all of them."""
        return [
            sum(column) for column in zip([0.0] * self._size, *(values for _, values in self._seconds), strict=True)
        ]


class Prompts(NamedTuple):
    """What an engine did of prompts: sums."""

    busy_s: float
    tokens: float


class DecodeSteps(NamedTuple):
    """Steps of an engine that computed no prompt: sums over them."""

    steps: float
    batch: float
    seconds: float
    batch_squared: float
    batch_seconds: float


class Pace:
    """What the reports of one engine say of its speed of late."""

    def __init__(self, work: Work) -> None:
        self._last = work
        self._prompts = Recent(len(Prompts._fields))
        self._decode = Recent(len(DecodeSteps._fields))

    def take(self, work: Work, *, now: float) -> None:
        """What the engine has done by now; an earlier report that comes late is left out."""
        steps, busy_s = work.steps - self._last.steps, work.busy_s - self._last.busy_s
        if steps <= 0 or busy_s <= 0:
            return
        prompt_tokens = work.prompt_tokens - self._last.prompt_tokens
        batch = (work.generated_tokens - self._last.generated_tokens) / steps
        self._last = work
        self._prompts.add(Prompts(busy_s, prompt_tokens), now=now)
        if not prompt_tokens:  # steps that compute prompts besides tell nothing of those that only decode
            self._decode.add(DecodeSteps(steps, steps * batch, busy_s, steps * batch**2, busy_s * batch), now=now)

    @property
    def prompts(self) -> Prompts:
        """Of late."""
        return Prompts(*self._prompts.sums)

    @property
    def decode(self) -> DecodeSteps:
        """Of late."""
        return DecodeSteps(*self._decode.sums)


class Tokens(NamedTuple):
    """Of the mean request."""

    computed: float  # of the prompt, that nobody had in a cache
    cached: float  # of the prompt, that somebody had
    generated: float

    @property
    def context(self) -> float:
        """Those whose KV a decode step reads, on average over the answer."""
        return self.computed + self.cached + self.generated / 2


class MeanRequest:
    """The tokens of requests that ended well of late."""

    def __init__(self) -> None:
        self._recent = Recent(1 + len(Tokens._fields))

    def take(self, *, prompt_tokens: int, generated_tokens: int, now: float, cached_tokens: int = 0) -> None:
        """One more: its prompt's tokens, of them those that somebody had in a cache, and its answer's."""
        self._recent.add((1, prompt_tokens - cached_tokens, cached_tokens, generated_tokens), now=now)

    @property
    def tokens(self) -> Tokens | None:
        """Its tokens; None before the first request has ended."""
        requests, *sums = self._recent.sums
        return Tokens(*(each / requests for each in sums)) if requests else None


def balance(mean: MeanRequest, workers: Iterable[tuple[Role, Limits, Pace]]) -> Balance | None:
    """The estimate over all workers; None before each tier has computed, and a request has ended."""
    every = list(workers)
    prompts = [pace.prompts for role, _, pace in every if role is Role.PREFILL]
    decode = [(limits, pace.decode) for role, limits, pace in every if role is Role.DECODE]
    busy_s, prompt_tokens = sum(each.busy_s for each in prompts), sum(each.tokens for each in prompts)
    tokens = mean.tokens
    if not (
        tokens and tokens.computed and tokens.generated and prompt_tokens and any(each.batch for _, each in decode)
    ):
        return None
    full = min(_full_batch(limits, tokens) for limits, _ in decode)
    # All decode workers have one model: who tells what a step reads tells it for those that do not.
    share = max((told for limits, _ in decode if (told := _kv_share(limits, tokens)) is not None), default=None)
    done = DecodeSteps(*map(sum, zip(*(steps for _, steps in decode), strict=True)))
    step_s, per_request_s, seen = _line(done, share)
    batch = seen if per_request_s is None else max(1.0, full)
    per_request_s = per_request_s or 0.0
    return Balance(
        prompt_tokens=tokens.computed,
        generated_tokens=tokens.generated,
        prefill_tokens_per_s=prompt_tokens / busy_s,
        decode_tokens_per_s=batch / (step_s + per_request_s * batch),
        batch_requests=batch,
        step_s=step_s,
        step_per_request_s=per_request_s,
    )


def _full_batch(limits: Limits, tokens: Tokens) -> float:
    # What is cached is taken to be there once for all requests.
    blocks = blocks_in_groups(math.ceil(tokens.computed + tokens.generated), limits.most_blocks)
    fitting = limits.pool_blocks / blocks
    return min(fitting, limits.batch_requests) if limits.batch_requests else fitting


def _kv_share(limits: Limits, tokens: Tokens) -> float | None:
    """Bytes of KV that a step reads of a request, as a share of those it reads of the weights; None: not told."""
    if not limits.step_weight_bytes or not limits.block_bytes:
        return None
    read = sum(tokens.context if window is None else min(tokens.context, window) for window in limits.windows)
    return read / BLOCK_TOKENS * limits.block_bytes / limits.step_weight_bytes


def _line(done: DecodeSteps, kv_share: float | None) -> tuple[float, float | None, float]:
    """A step's time without requests, what each adds (None: that cannot be told), and the mean batch.

    `kv_share` is what each adds to the bytes of a step without requests, as a share of them.
    """
    batch, step_s = done.batch / done.steps, done.seconds / done.steps
    variance = max(0.0, done.batch_squared / done.steps - batch**2)
    covariance = done.batch_seconds / done.steps - batch * step_s
    noise = _TELLING * batch**2
    if kv_share is not None:
        by_bytes = step_s * kv_share / (1 + batch * kv_share)
        # From the one to the other without a jump, but soon: bytes say too much where launches take the time.
        slope = (variance * covariance + noise**2 * by_bytes) / (variance**2 + noise**2)
    elif variance >= noise:
        slope = covariance / variance
    else:
        return step_s, None, batch
    slope = min(max(0.0, slope), step_s / batch)  # neither a request nor an empty step takes less than no time
    return step_s - slope * batch, slope, batch
