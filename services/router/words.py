"""What workers say of a request, and what they are told of it: the router's own types, free of protobuf."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from paceline import wire
from paceline.types import FinishReason, ReservationId, SamplingParams, TokenLogprob, WorkerLoad


class TransferSum(msgspec.Struct, frozen=True, kw_only=True):
    """What a hand-off moved."""

    blocks: int = 0
    bytes: int = 0
    parts: int = 0
    parts_before_last_chunk: int = 0
    duration_s: float = 0.0
    held_blocks: int = 0  # there already, and not moved


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker's answer: the first token of each choice, and the finish where they end the request."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finishes: tuple[FinishReason, ...] = ()  # of all choices, where `finish` is set
    duration_s: float
    cached_tokens: int
    transfer: TransferSum  # as far as it had come
    load: WorkerLoad | None


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker accepted, and waits for the writer of `attempt`."""

    attempt: int
    load: WorkerLoad | None


class NewTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a step; `index` is the first one's in the answer."""

    index: int
    ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of `ids`, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # once, where they were asked for


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """One of several choices has ended."""

    choice: int
    reason: FinishReason
    completion_tokens: int


class Retargeted(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker gave an attempt up. `attempt` is the next; None where it computes the prompt itself."""

    attempt: int | None


class DecodeFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker's last word on a request."""

    reason: FinishReason
    completion_tokens: int
    prompt_tokens_computed: int
    cached_tokens: int
    transfer: TransferSum
    attempts: int
    load: WorkerLoad | None


DecodeEvent = Reserved | NewTokens | ChoiceFinished | Retargeted | DecodeFinished


class RetargetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to Retarget: the next attempt, or `local`, or `landed` where all of the KV is there already."""

    attempt: int | None = None
    local: bool = False
    landed: bool = False
    load: WorkerLoad | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What both workers are told of a request."""

    request_id: str
    reservation_id: ReservationId
    prompt: wire.EncodedIds
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    cache_salt: str = ""


def first_words(reply: PrefillReply, sampling: SamplingParams) -> Iterator[NewTokens | ChoiceFinished]:
    """A prefill worker's reply as a decode worker would say it."""
    scores = reply.prompt_logprobs
    if sampling.beam_width is not None:
        yield NewTokens(index=0, ids=(), prompt_logprobs=scores)  # its tokens are for the decode worker to choose among
        return
    if sampling.n == 1:
        yield NewTokens(index=0, ids=reply.tokens, logprobs=reply.logprobs, prompt_logprobs=scores)
        return
    for choice, token in enumerate(reply.tokens):
        logprobs = reply.logprobs[choice : choice + 1]
        yield NewTokens(index=0, ids=(token,), choice=choice, logprobs=logprobs, prompt_logprobs=scores)
    if reply.finish is not None:
        for choice, reason in enumerate(reply.finishes):
            yield ChoiceFinished(choice=choice, reason=reason, completion_tokens=1)
