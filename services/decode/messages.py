"""What a decode front and its engine process say to each other, beyond what every worker does."""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.kvtransfer.layout import Fingerprint
from paceline.services.worker.messages import Failure, Message, Ping, Report
from paceline.types import FinishReason, ReservationId, SamplingParams, TokenLogprob, WorkerKey

# Front to engine


class Reserve(Message, frozen=True, kw_only=True):
    """Take this request, or refuse. Answered by `Reserved` or `Over`."""

    reservation_id: ReservationId
    prompt: list[int]
    sampling: SamplingParams
    local: bool  # compute the prompt here
    priority: int = 0
    cache_salt: str = ""


class ClaimWrite(Message, frozen=True, kw_only=True):
    """A prefill worker, found in the registry, asks where to write. Answered by `WriteGranted` or `CallRefused`."""

    call_id: int
    reservation_id: ReservationId
    attempt: int
    writer: WorkerKey
    fingerprint: Fingerprint


class GiveUpAttempt(Message, frozen=True, kw_only=True):
    """The router re-targets. Answered by `Redirected` or `CallRefused`."""

    call_id: int
    reservation_id: ReservationId
    attempt: int
    local: bool


class EndRequest(Message, frozen=True, kw_only=True):
    """The caller gave up. Where the request was live, answered by `Over`."""

    reservation_id: ReservationId
    cause: Literal["cancelled", "stream_lost", "deadline"] = "cancelled"


class EndChoice(Message, frozen=True, kw_only=True):
    """The caller has enough of one choice. Where it was live, answered by `ChoiceOver`."""

    reservation_id: ReservationId
    choice: int


class WriterStopped(Message, frozen=True, kw_only=True):
    """The prefill worker says that every handle of the attempt is terminal."""

    reservation_id: ReservationId
    attempt: int
    writer: WorkerKey


class WriterDead(Message, frozen=True, kw_only=True):
    """This life of a prefill worker is over: a later one holds the very start lock that it held."""

    writer: WorkerKey


DecodeCommand: TypeAlias = Reserve | ClaimWrite | GiveUpAttempt | EndRequest | EndChoice | WriterStopped | WriterDead


# Engine to front


class Reserved(Message, frozen=True, kw_only=True):
    """The request has its blocks."""

    reservation_id: ReservationId


class WriteGranted(Message, frozen=True, kw_only=True):
    """Where to write: `blocks` starts behind the `held_tokens` of the prompt's beginning that are there already."""

    call_id: int
    blocks: list[int]
    held_tokens: int
    agent: bytes  # grants writes to the pool: never logged


class CallRefused(Message, frozen=True, kw_only=True):
    """The error of a call."""

    call_id: int
    failure: Failure


class Redirected(Message, frozen=True, kw_only=True):
    """A new attempt, or none where the prompt is computed here. `call_id` is None where nobody had asked."""

    reservation_id: ReservationId
    call_id: int | None
    attempt: int | None
    cause: str


class NewTokens(Message, frozen=True, kw_only=True):
    """Tokens of one request, of one step."""

    reservation_id: ReservationId
    ids: list[int]
    index: int  # of the first, in the answer
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of `ids`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token of a prompt that was computed here


class ChoiceOver(Message, frozen=True, kw_only=True):
    """One of several choices has ended; `Over` follows the last."""

    reservation_id: ReservationId
    choice: int
    finish: FinishReason
    completion_tokens: int


class Over(Message, frozen=True, kw_only=True):
    """The request has ended, told once."""

    reservation_id: ReservationId
    finish: FinishReason
    failure: Failure | None = None
    completion_tokens: int = 0
    prompt_tokens_computed: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache here: neither sent nor computed here
    attempts: int = 1
    blocks_landed: int = 0
    bytes_landed: int = 0
    parts_landed: int = 0
    landing_seconds: float = 0.0


class StopWriter(Message, frozen=True, kw_only=True):
    """Ask the prefill worker to stop the attempt, until it says that all is terminal."""

    reservation_id: ReservationId
    attempt: int
    writer: WorkerKey


class QuarantineAlarm(Message, frozen=True, kw_only=True):
    """Somebody has been able to write to given-up blocks for too long."""

    reservation_id: ReservationId
    attempt: int
    writer: WorkerKey
    num_blocks: int
    age_s: float


class MustRestart(Message, frozen=True, kw_only=True):
    """Too much of the pool is in quarantine: drain, and start again under a new epoch."""

    quarantined_blocks: int
    pool_blocks: int


DecodeEvent: TypeAlias = (
    Reserved
    | WriteGranted
    | CallRefused
    | Redirected
    | NewTokens
    | ChoiceOver
    | Over
    | StopWriter
    | QuarantineAlarm
    | MustRestart
)


class DecodeReport(Report, frozen=True, kw_only=True):
    """One round of a decode engine: the tokens of its step leave in one message."""

    ended: tuple[tuple[str, str, int], ...] = ()  # reservations that ended: state before, cause, number

    events: tuple[DecodeEvent, ...] = ()


COMMANDS = DecodeCommand | Ping
