"""What every front and engine process say to each other, whatever the tier. Each tier adds its own."""

from __future__ import annotations

import msgspec

from paceline.errors import PacelineError, rebuild
from paceline.kvtransfer.layout import Fingerprint
from paceline.prefix import KvChange
from paceline.types import Limits, WorkerLoad


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message of the link; the tag is its class's name."""


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to the other process."""

    reason: str
    message: str
    metadata: dict[str, str]

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        """The error, packed."""
        return cls(error.reason, error.message, error.metadata)

    def error(self) -> PacelineError:
        """The error, unpacked."""
        return rebuild(self.reason, self.message, self.metadata)


class Ping(Message, frozen=True):
    """Front to engine: come round and report. What makes the age of the loop's tick mean something while it is idle."""


class Alive(Message, frozen=True):
    """Engine to front: the answer to a `Ping` in the middle of a step, which has no report yet."""


class Ready(Message, frozen=True, kw_only=True):
    """Engine to front: warmed up."""

    limits: Limits
    fingerprint: Fingerprint
    eos_token_ids: tuple[int, ...]
    transport: str


class FailedStart(Message, frozen=True, kw_only=True):
    """Engine to front: cannot start, and why."""

    failure: Failure


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of the loop did, for the metrics."""

    step_seconds: float = 0.0  # 0: no step ran
    batch_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    parts_landed: int = 0
    parts_sent: int = 0
    writes: tuple[tuple[int, float], ...] = ()  # bytes and seconds of each hand-off that ended well
    failed_writes: int = 0


IDLE = Activity()


class Report(Message, frozen=True, kw_only=True):
    """Engine to front, once a round: the load, what was done. A tier's own report adds its events."""

    load: WorkerLoad
    activity: Activity = IDLE
    kv: tuple[KvChange, ...] = ()  # of the prefix cache, since the last report, in order
    reservations: dict[str, int] = {}
    ignored: dict[str, int] = {}
