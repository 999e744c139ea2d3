"""What the client hands out: frozen values, free of any generated code. Times are in seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec

from paceline.types import FinishReason, Limits, Role, TokenLogprob, Usage, WorkerKey, WorkerLoad


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. `role` is system, user, assistant or tool."""

    role: str
    content: str


class Sampling(TypedDict, total=False):
    """How to choose tokens, under the names of the OpenAI API. What is left out takes the router's default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    best_of: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    logprobs: int | None
    prompt_logprobs: int | None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, measured by the router."""

    queued_s: float
    prefill_s: float
    transfer_s: float
    first_token_s: float
    total_s: float


class TransferSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the hand-off moved from the prefill to the decode worker."""

    blocks: int
    bytes: int
    parts: int
    parts_before_last_chunk: int
    duration_s: float
    held_blocks: int = 0  # on the decode worker already: they did not move


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an answer. `prefill_worker` is None where the decode worker computed the prompt itself."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    transfer: TransferSummary
    prefill_worker: WorkerKey | None
    decode_worker: WorkerKey | None
    stop_text: str | None = None
    cumulative_logprob: float | None = None  # the sum of the choice's tokens', where logprobs were asked for
    prompt_tokens_computed_on_decode: int = 0
    attempts: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer; `finish` is set in the last one of each choice."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int  # of the first of token_ids in the answer
    choice: int = 0
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in the first piece: of the prompt's tokens from the second on


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the answers to a request that asked for `n`."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_text: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None  # the sum of them


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. Text, ids and log-probabilities are the first choice's, for most requests have but one."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish  # of the request: its usage is over all choices
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    choices: tuple[Choice, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served, and what it can be asked."""

    model: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A running process. `role` and `worker` are None for the router."""

    version: str
    role: Role | None
    worker: WorkerKey | None
    model: str
    limits: Limits
    uptime_s: float
    transport: str
    process_ids: tuple[int, ...]  # the front's, then the engine's


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the router sees it."""

    key: WorkerKey
    role: Role
    address: str
    model: str
    limits: Limits
    load: WorkerLoad
    heartbeat_age_s: float
    draining: bool


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers of each tier suit the requests of late, as the router reckons. Rates are those of one worker."""

    prompt_tokens: float  # of the mean request, to be computed
    generated_tokens: float  # of the mean request
    prefill_tokens_per_s: float  # while it computes
    decode_tokens_per_s: float  # with `batch_requests` in its batch
    batch_requests: float  # the most that it holds, or the mean batch where no more could be told
    step_s: float  # of a decode step, without its requests
    step_per_request_s: float
    prefill_per_decode: float  # prefill workers that keep one decode worker busy


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The router's queue and its workers, by role and id."""

    queued: int  # requests that wait for a place
    active: int  # requests that have one
    workers: tuple[Worker, ...]
    balance: Balance | None = None  # None before each tier has computed, and a request has ended
    obstacle: str | None = None  # why no request could be placed now, in words; None where one could

    def of(self, role: Role) -> tuple[Worker, ...]:
        """The workers of one tier."""
        return tuple(worker for worker in self.workers if worker.role is role)


class Health(enum.Enum):
    """What a server's health service says."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNKNOWN = "unknown"
