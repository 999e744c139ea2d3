"""Every error Paceline raises on purpose, as one tree.

::

    PacelineError
    ├── InvalidRequest          the caller's fault; retrying unchanged cannot help
    │   ├── PromptTooLong       prompt + max_tokens over the context
    │   ├── ExceedsPool         prompt + max_tokens over a worker's whole KV pool
    │   ├── UnsupportedFeature  a field that is understood and not served yet
    │   └── UnknownModel        no worker serves the model that was named
    ├── Overloaded              full for now; `retry_after_s` says when to come back
    ├── Unavailable             no worker can serve now
    │   ├── NoWorker            none is alive for the tier
    │   ├── UnknownWorker       one that did not register, or whose lease has ended
    │   ├── WorkerLost          one died with the request in its hands
    │   └── Draining            it finishes what it has and takes nothing new
    ├── RequestCancelled        the caller, or a peer on its behalf, gave up
    ├── DeadlineExceeded        the request's time ran out
    ├── HandoffError            a hand-off that cannot go on; the request itself may
    │   ├── FingerprintMismatch two workers' pools do not speak the same KV
    │   ├── UnknownReservation  never made, or already ended
    │   ├── WrongAttempt        the attempt is not the reservation's current one
    │   ├── StaleEpoch          meant for an earlier life of this worker
    │   ├── AlreadyLanded       all parts are there, nothing is left to re-target
    │   ├── TransferFailed      the transport gave up on a write
    │   └── SlowTransport       the measured bandwidth is under the floor
    ├── EngineError             our fault
    │   ├── NumericalError      NaN or infinite logits in this request's row
    │   ├── EngineUnsound       NaN or infinite logits for everybody
    │   └── EngineLost          the engine process is gone
    └── StartupError            the process cannot start; the message says what to change
        ├── ConfigError         a setting that does not parse, or contradicts another
        ├── CheckpointError     a model file that is broken, incomplete or unsupported
        ├── FetchError          a model that is neither cached nor to be fetched
        ├── DiskFull            the cache has no room; both sizes are named
        └── AddressInUse        another process has the port

A leaf carries a `Status` and a `reason`. Code branches on the reason, never on the status: gRPC makes some of its own.
The wire's table from reasons to leaves is in `paceline.wire`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

QUOTE_LIMIT = 200


def quote(value: object) -> str:
    """`repr` of a value for an error message, cut at 200 characters so that hostile input cannot flood a log."""
    text = repr(value)
    return text if len(text) <= QUOTE_LIMIT else f"{text[:QUOTE_LIMIT]}… ({len(text)} characters)"


class Status(enum.Enum):
    """The gRPC status codes in use, by their canonical numbers, free of any import of grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class PacelineError(Exception):
    """Root of the tree. `str()` of it is fit to show to the caller."""

    status: ClassVar[Status] = Status.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def metadata(self) -> dict[str, str]:
        """Machine-readable details for the ErrorInfo on the wire."""
        return {}


class InvalidRequest(PacelineError):
    """A request that can never be served. Names the field."""

    status = Status.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

    @property
    def metadata(self) -> dict[str, str]:
        """The offending field."""
        return {"field": self.field}


class PromptTooLong(InvalidRequest):
    """Prompt and max_tokens together exceed the context window."""

    reason = "PROMPT_TOO_LONG"


class ExceedsPool(InvalidRequest):
    """Prompt and max_tokens together exceed the whole KV pool, so that no wait would help."""

    reason = "EXCEEDS_POOL"


class UnsupportedFeature(InvalidRequest):
    """A legal field whose feature is not served by this version."""

    status = Status.UNIMPLEMENTED
    reason = "UNSUPPORTED_FEATURE"


class UnknownModel(InvalidRequest):
    """The model named in the request is not the one served."""

    status = Status.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class Overloaded(PacelineError):
    """Full for now. `retry_after_s` is the wait, in seconds, after which a retry is sensible."""

    status = Status.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def metadata(self) -> dict[str, str]:
        """When to come back, in seconds."""
        return {"retry_after_s": f"{self.retry_after_s:.3f}"}


class Unavailable(PacelineError):
    """No worker can serve the request now; a retry may find one."""

    status = Status.UNAVAILABLE
    reason = "UNAVAILABLE"


class NoWorker(Unavailable):
    """No live worker of a needed tier is registered, or none any more that could hold an accepted request."""

    reason = "NO_WORKER"


class UnknownWorker(Unavailable):
    """A worker that did not register here, or whose lease has ended: it is to register again."""

    status = Status.NOT_FOUND
    reason = "UNKNOWN_WORKER"


class WorkerLost(Unavailable):
    """A worker died, or could not be reached, with the request in its hands."""

    reason = "WORKER_LOST"


class Draining(Unavailable):
    """The worker finishes what it has and takes nothing new."""

    reason = "DRAINING"


class RequestCancelled(PacelineError):
    """The caller, or a peer on its behalf, gave the request up."""

    status = Status.CANCELLED
    reason = "CANCELLED"


class DeadlineExceeded(PacelineError):
    """The request's time ran out, in a queue or in work."""

    status = Status.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class HandoffError(PacelineError):
    """The hand-off of a prompt's KV cannot go on. The request may still be served another way."""

    status = Status.FAILED_PRECONDITION
    reason = "HANDOFF_FAILED"


class FingerprintMismatch(HandoffError):
    """Two workers whose pools do not hold the same KV: both values are named."""

    reason = "FINGERPRINT_MISMATCH"


class UnknownReservation(HandoffError):
    """No such reservation: it was never made here, or it has ended."""

    status = Status.NOT_FOUND
    reason = "UNKNOWN_RESERVATION"


class WrongAttempt(HandoffError):
    """The attempt is not the reservation's current one, or its state does not allow the call."""

    status = Status.ABORTED
    reason = "WRONG_ATTEMPT"


class StaleEpoch(HandoffError):
    """A call for an earlier life of this worker, or from a peer that is not registered under that epoch."""

    status = Status.ABORTED
    reason = "STALE_EPOCH"


class AlreadyLanded(HandoffError):
    """All parts are there: nothing is left to re-target."""

    reason = "ALREADY_LANDED"


class TransferFailed(HandoffError):
    """The transport reported a failed write."""

    status = Status.INTERNAL
    reason = "TRANSFER_FAILED"


class SlowTransport(HandoffError):
    """The measured bandwidth of a pair is under the floor, which mostly means a silent fall-back to TCP."""

    reason = "SLOW_TRANSPORT"


class EngineError(PacelineError):
    """A fault of our own."""

    reason = "ENGINE_ERROR"


class NumericalError(EngineError):
    """NaN or infinite logits in this request's row; its neighbours are untouched."""

    reason = "NUMERICAL_ERROR"


class EngineUnsound(EngineError):
    """The engine computes nothing that can be used any more, for whomever: it must be started anew."""

    reason = "ENGINE_UNSOUND"


class EngineLost(EngineError):
    """The engine process is gone, and the service with it."""

    status = Status.UNAVAILABLE
    reason = "ENGINE_LOST"


class StartupError(PacelineError):
    """The process cannot start. The command line prints the message alone and exits with 2."""

    status = Status.FAILED_PRECONDITION
    reason = "STARTUP_FAILED"


class ConfigError(StartupError):
    """A setting that does not parse, is out of range, or contradicts another."""

    reason = "CONFIG_INVALID"


class CheckpointError(StartupError):
    """A model file that is broken, incomplete or of an unsupported kind."""

    reason = "CHECKPOINT_INVALID"


class FetchError(StartupError):
    """A model that is not cached and could not be fetched."""

    reason = "FETCH_FAILED"


class DiskFull(StartupError):
    """The cache folder's file system has too little room."""

    reason = "DISK_FULL"


class AddressInUse(StartupError):
    """Another process listens on the port that was asked for."""

    reason = "ADDRESS_IN_USE"


def rebuild(reason: str, message: str, metadata: Mapping[str, str]) -> PacelineError:
    """The error another process raised, from its reason, message and metadata; an unknown reason is an EngineError."""
    leaf = _leaves().get(reason, EngineError)
    if issubclass(leaf, InvalidRequest):
        field = metadata.get("field", "request")
        return leaf(field, message.removeprefix(f"{field}: "))
    if issubclass(leaf, Overloaded):
        return leaf(message, retry_after_s=float(metadata.get("retry_after_s", "1")))
    return leaf(message)


def _leaves() -> dict[str, type[PacelineError]]:
    found: dict[str, type[PacelineError]] = {}
    pending: list[type[PacelineError]] = [PacelineError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.reason, kind)
        pending.extend(kind.__subclasses__())
    return found
