"""What happens on a leg of a request, what it leads to, and what is noted on the way."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.errors import (
    Draining,
    EngineLost,
    FingerprintMismatch,
    PacelineError,
    RequestCancelled,
    SlowTransport,
    StaleEpoch,
    WorkerLost,
)
from paceline.services.router.words import (
    DecodeEvent,
    DecodeFinished,
    PrefillReply,
    RetargetOutcome,
    TransferSum,
)
from paceline.types import FinishReason, WorkerKey

LOST: Final = (WorkerLost, EngineLost, StaleEpoch, Draining, RequestCancelled)
"""What says of a worker that it will not go on, and nothing of the request. (Nobody here cancels and still listens.)"""


UNFIT: Final = (FingerprintMismatch, SlowTransport)
"""What says that a prefill worker cannot write to this decode worker, now or later."""


class PrefillReplied(msgspec.Struct, frozen=True):
    """The Prefill call of an attempt was answered."""

    attempt: int
    reply: PrefillReply


class PrefillFailed(msgspec.Struct, frozen=True):
    """The Prefill call of an attempt failed."""

    attempt: int
    error: PacelineError


class WriterLost(msgspec.Struct, frozen=True):
    """The prefill worker that has an attempt in hand is lost; its call may have been answered."""

    attempt: int
    worker: WorkerKey
    error: PacelineError


class DecodeFailed(msgspec.Struct, frozen=True):
    """The stream of the decode worker failed."""

    error: PacelineError


class RetargetFailed(msgspec.Struct, frozen=True):
    """The decode worker would not re-target."""

    error: PacelineError


Event = DecodeEvent | PrefillReplied | PrefillFailed | WriterLost | DecodeFailed | RetargetOutcome | RetargetFailed


class Record(msgspec.Struct, kw_only=True):
    """What is known of a request's way so far, for its finish. Times are on the loop's clock, in seconds."""

    reserved_at: float | None = None
    prefill_s: float | None = None
    cached_tokens: int = 0
    transfer: TransferSum = TransferSum()  # as far as the prefill worker had come when it replied
    prefill_worker: WorkerKey | None = None
    decode_worker: WorkerKey | None = None
    attempts: int = 1

    def note(self, reply: PrefillReply) -> None:
        """Takes in what the prefill worker says of its part."""
        self.prefill_s = reply.duration_s
        self.cached_tokens = reply.cached_tokens
        self.transfer = reply.transfer


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The request is over. `decode` is the decode worker's last word, None where that was not waited for."""

    reason: FinishReason
    decode: DecodeFinished | None = None


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """Another place may do, and will say the same tokens again. `refused`: it was full; else it was lost."""

    error: PacelineError
    refused: bool
