"""What a prefill front and its engine process say to each other, beyond what every worker does."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.kvtransfer.layout import Fingerprint
from paceline.services.worker.messages import Failure, Message, Ping, Report
from paceline.types import FinishReason, ReservationId, SamplingParams, TokenLogprob, WorkerKey


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of one reservation: what a hand-off is known by."""

    reservation_id: ReservationId
    number: int

    def __str__(self) -> str:
        return f"{self.reservation_id}/{self.number}"


# Front to engine


class StartPrefill(Message, frozen=True, kw_only=True):
    """Compute this prompt, or refuse."""

    attempt: Attempt
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class WriteTo(Message, frozen=True, kw_only=True):
    """The claim succeeded: where the KV goes. `blocks` starts behind the `held_tokens` that the target has already."""

    attempt: Attempt
    target: WorkerKey
    blocks: list[int]
    held_tokens: int
    agent: bytes  # grants writes to the target's pool: never logged
    fingerprint: Fingerprint


class AbortAttempt(Message, frozen=True, kw_only=True):
    """Stop. Answered by `Stopped` once no write can touch the target any more; number 0 means every attempt."""

    attempt: Attempt
    call_id: int


class MeasureTo(Message, frozen=True, kw_only=True):
    """Measure the way to a target that has granted these blocks. Answered by `Measured`; ended by `AbortAttempt`."""

    attempt: Attempt
    target: WorkerKey
    blocks: list[int]
    agent: bytes
    fingerprint: Fingerprint


PrefillCommand: TypeAlias = StartPrefill | WriteTo | AbortAttempt | MeasureTo


# Engine to front


class Prefilled(Message, frozen=True, kw_only=True):
    """The first token is known. `finish` is set where it ends the request; then nothing more is written."""

    attempt: Attempt
    tokens: list[int]  # one a choice
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from the second on, likewise
    finishes: tuple[FinishReason, ...] = ()  # of all choices, where `finish` is set
    blocks: int  # to hand over in all
    num_bytes: int
    parts: int
    parts_before_last_chunk: int
    cached_tokens: int = 0  # of the prompt, found in the cache and not computed


class PrefillFailed(Message, frozen=True, kw_only=True):
    """The attempt was refused, or cannot go on."""

    attempt: Attempt
    failure: Failure
    target: WorkerKey | None = None  # set where parts were written, so that the target may be waiting for more


class Stopped(Message, frozen=True, kw_only=True):
    """Answers `AbortAttempt`: every handle is terminal, and no other will be posted."""

    call_id: int
    found: bool


class Measured(Message, frozen=True, kw_only=True):
    """Answers `MeasureTo`."""

    attempt: Attempt
    bytes_per_second: float = 0.0
    failure: Failure | None = None


PrefillEvent: TypeAlias = Prefilled | PrefillFailed | Stopped | Measured


class PrefillReport(Report, frozen=True, kw_only=True):
    """One round of a prefill engine."""

    events: tuple[PrefillEvent, ...] = ()


COMMANDS = PrefillCommand | Ping
