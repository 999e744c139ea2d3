"""What is told to the reservations of a decode worker: plain data.

Events come from four places: the router (`Cancel`, `Retarget`), the prefill worker that writes (`Claim`, `Part`,
`WriteFailed`, `WriterTerminal`), whoever can prove a death (`WriterProvenDead`, `WriterReplaced`), and the worker's own
engine (`PromptComputed`, `StepTaken`, `Preempted`, `Finished`, `NonFinite`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from paceline.types import ReservationId, TokenLogprob, WorkerKey


class Blocks(Protocol):
    """A handle on blocks of the pool. Opaque here: it is only counted, handed on, or released once."""

    def __len__(self) -> int:
        """Number of blocks."""
        ...

    def release(self) -> None:
        """Gives the blocks back. Called at most once per handle; a second call may raise."""
        ...


B = TypeVar("B", bound=Blocks)


class Target(enum.Enum):
    """Where a prompt's KV is to come from."""

    REMOTE = "remote"
    LOCAL = "local"


class RetryCause(enum.Enum):
    """Why an attempt was given up for another one."""

    NOT_CLAIMED = "not_claimed"
    RETARGETED = "retargeted"
    WRITE_FAILED = "write_failed"
    SILENT = "silent"
    WRITER_DEAD = "writer_dead"


class EndCause(enum.Enum):
    """Why a reservation ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    STREAM_LOST = "stream_lost"
    DEADLINE = "deadline"
    NON_FINITE = "non_finite"
    NO_BLOCKS = "no_blocks"


@dataclass(frozen=True, slots=True)
class Claim:
    """P asks to write. Answered by `Grant` or `Refuse`; the same writer may ask again and gets the same answer."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey


@dataclass(frozen=True, slots=True)
class Part:
    """A notification: part number `part`, from 0, is in the pool.

    The last one has the highest number. They arrive in any order.
    """

    reservation: ReservationId
    attempt: int
    writer: WorkerKey
    part: int
    last: bool = False
    first_tokens: tuple[int, ...] = ()  # token ids that P sampled, one a choice; they come with the last part
    first_logprobs: tuple[TokenLogprob, ...] = ()  # theirs, where they were asked for
    num_blocks: int = 0  # that came with it


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """P's transport gave up on a write of this attempt; other writes of it may still be under way."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey


@dataclass(frozen=True, slots=True)
class WriterTerminal:
    """P says that every handle of this attempt is terminal, and that it will never post another one for it."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey


@dataclass(frozen=True, slots=True)
class Retarget:
    """The router gives `attempt` up. Answered by `NewTarget` or `Refuse`."""

    reservation: ReservationId
    attempt: int
    to: Target = Target.REMOTE


@dataclass(frozen=True, slots=True)
class Cancel:
    """The request is given up: by the caller, because its stream is lost, or at its deadline."""

    reservation: ReservationId
    cause: EndCause = EndCause.CANCELLED


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The engine has computed the whole prompt by itself."""

    reservation: ReservationId


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The engine took a landed request into a step."""

    reservation: ReservationId


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine took the request's blocks away, and will compute its tokens again by itself."""

    reservation: ReservationId


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine is done with the request."""

    reservation: ReservationId


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The request's logits hold NaN or infinity."""

    reservation: ReservationId


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The reservation's own timer ran out: no claim, or no part, in time. Made by `Reservations.expire`."""

    reservation: ReservationId


@dataclass(frozen=True)
class NewBlocks(Generic[B]):
    """The outcome of `WantBlocks`: a handle, or None where the pool has no room. Made by `Reservations`."""

    reservation: ReservationId
    blocks: B | None
    cause: RetryCause


@dataclass(frozen=True, slots=True)
class WriterProvenDead:
    """This very life of a worker is over: its supervisor reaped it. A missed heart-beat is no proof."""

    writer: WorkerKey


@dataclass(frozen=True, slots=True)
class WriterReplaced:
    """A newer life of a worker holds its start lock, which proves every earlier one dead."""

    by: WorkerKey


EngineEvent: TypeAlias = PromptComputed | StepTaken | Preempted | Finished | NonFinite
WriterEvent: TypeAlias = Claim | Part | WriteFailed | WriterTerminal
ReservationEvent: TypeAlias = WriterEvent | EngineEvent | Retarget | Cancel
Event: TypeAlias = ReservationEvent | WriterProvenDead | WriterReplaced
