"""Each request of a run: its moment and its prompt. A function of the settings and the request's number alone, so that
every generator process can make its own share, and a run can be repeated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.errors import ConfigError
from paceline.loadtest.arrivals import poisson, replayed
from paceline.loadtest.config import DEFAULT_REQUESTS, BenchConfig, Mode
from paceline.loadtest.trace import read_trace

_WORD_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `at_s` is its moment from the start of the run, None where it follows another's end."""

    index: int
    at_s: float | None
    input_tokens: int
    output_tokens: int


class Workload:
    """The requests of a run. `context_tokens` bounds prompt and answer together, where it is known."""

    def __init__(self, config: BenchConfig, *, vocab_size: int, context_tokens: int | None) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._trace = None if config.trace is None else read_trace(config.trace, unit=config.trace_unit)

    @property
    def expected(self) -> int | None:
        """How many requests there are at most; None where only the time ends them."""
        if self._config.mode is Mode.CLOSED:
            return self._count
        return sum(1 for _ in self._open())

    def check(self) -> None:
        """Raises ConfigError where a request exceeds the context, or none is to be sent."""
        jobs = [Job(0, None, *self._longest)] if self._config.mode is Mode.CLOSED else list(self._open())
        if not jobs:
            raise ConfigError(f"no request falls into the {self._config.duration_s} s of duration_s")
        limit = self._context_tokens
        for job in jobs:
            if limit is not None and job.input_tokens + job.output_tokens > limit:
                raise ConfigError(
                    f"request {job.index}: {job.input_tokens} prompt and {job.output_tokens} answer tokens exceed "
                    f"the model's context of {limit}"
                )

    def jobs(self, share: int = 0, shares: int = 1) -> Iterator[Job]:
        """The requests of one of several processes.

        A closed loop's are dealt by the place (of `concurrency`) that they fall to, so that each process has as many
        for each of its places as any other.
        """
        places = self._config.concurrency
        for job in self._closed() if self._config.mode is Mode.CLOSED else self._open():
            place = job.index if places is None else job.index % places
            if place % shares == share:
                yield job

    def warmups(self, share: int = 0, shares: int = 1) -> list[Job]:
        """Requests to be sent before the clock starts. Their numbers are negative, and so their prompts others."""
        indices = range(-self._config.warmup + share, 0, shares)
        return [Job(index, None, *self._lengths(index)) for index in indices]

    def prompt(self, job: Job) -> list[int]:
        """The token ids of a request's prompt."""
        shared = round(self._config.shared_prefix * job.input_tokens)
        own = self._ids(f"prompt {self._config.seed} {job.index}", job.input_tokens - shared)
        return (self._ids(f"prefix {self._config.seed}", shared) + own) if shared else own

    def _ids(self, seed: str, count: int) -> list[int]:
        # In one draw: a million ids a second must not hold up the loop that stamps answers.
        words = memoryview(random.Random(seed).randbytes(_WORD_BYTES * count)).cast("I")
        vocab_size = self._vocab_size
        return [word % vocab_size for word in words]

    def _open(self) -> Iterator[Job]:
        config = self._config
        if self._trace is not None:
            cut = replayed(self._trace, speed=config.trace_speed, count=config.requests, duration_s=config.duration_s)
            for index, (moment, entry) in enumerate(cut):
                yield Job(index, moment, entry.input_tokens, entry.output_tokens)
            return
        assert config.rate is not None, "the search sets it"
        moments = poisson(config.rate, seed=config.seed, count=self._count, duration_s=config.duration_s)
        for index, moment in enumerate(moments):
            yield Job(index, moment, *self._lengths(index))

    def _closed(self) -> Iterator[Job]:
        count = self._count
        for index in itertools.count() if count is None else range(count):
            yield Job(index, None, *self._lengths(index))

    @property
    def _count(self) -> int | None:
        config = self._config
        return DEFAULT_REQUESTS if config.requests is None and config.duration_s is None else config.requests

    def _lengths(self, index: int) -> tuple[int, int]:
        config = self._config
        draw = random.Random(f"lengths {config.seed} {index}")
        return (
            _spread(draw, config.input_len, config.input_spread),
            _spread(draw, config.output_len, config.output_spread),
        )

    @property
    def _longest(self) -> tuple[int, int]:
        config = self._config
        longest_input = config.input_len + _reach(config.input_len, config.input_spread)
        return longest_input, config.output_len + _reach(config.output_len, config.output_spread)


def _spread(draw: random.Random, length: int, share: float) -> int:
    reach = _reach(length, share)
    return draw.randint(length - reach, length + reach)


def _reach(length: int, share: float) -> int:
    return int(length * share)
