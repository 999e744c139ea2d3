"""What the reservations of a decode worker ask for: plain data for the worker, or for `Reservations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias

from paceline.errors import DeadlineExceeded, NumericalError, Overloaded, PacelineError, RequestCancelled
from paceline.services.decode.reservation_events import B, EndCause, RetryCause, Target
from paceline.types import ReservationId, TokenLogprob, WorkerKey

NO_BLOCKS_RETRY_S = 1.0
"""Seconds after which a request that found no blocks for its second attempt may sensibly come back."""


@dataclass(frozen=True)
class Grant(Generic[B]):
    """Answer the claim: the writer may write to `blocks`, which stay the reservation's."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey
    blocks: B


@dataclass(frozen=True, slots=True)
class NewTarget:
    """Tell the router where the KV is to come from now: in answer to its `Retarget`, else on the request's stream."""

    reservation: ReservationId
    attempt: int
    target: Target
    cause: RetryCause


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the claim or the re-target with an error."""

    reservation: ReservationId
    error: PacelineError


@dataclass(frozen=True, slots=True)
class AbortWriter:
    """Tell P to stop, and to say when every handle of the attempt is terminal. Asked again until it has."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey


@dataclass(frozen=True)
class Land(Generic[B]):
    """Give the engine a request whose prompt is computed. `blocks` are the engine's from here on."""

    reservation: ReservationId
    attempt: int
    blocks: B
    first_tokens: tuple[int, ...]
    first_logprobs: tuple[TokenLogprob, ...] = ()
    landed_parts: int = 0  # with blocks
    landed_blocks: int = 0


@dataclass(frozen=True)
class StartLocalPrefill(Generic[B]):
    """Give the engine a request whose prompt it computes itself. `blocks` are the engine's from here on."""

    reservation: ReservationId
    blocks: B


@dataclass(frozen=True, slots=True)
class End:
    """The reservation is over, told exactly once.

    Where `engine_holds`, the engine drops the request, if it still has it, and frees its blocks.
    """

    reservation: ReservationId
    cause: EndCause
    engine_holds: bool

    @property
    def error(self) -> PacelineError | None:
        """What the caller is told; None for a request that finished."""
        match self.cause:
            case EndCause.FINISHED:
                return None
            case EndCause.CANCELLED:
                return RequestCancelled(f"request {self.reservation} was cancelled")
            case EndCause.STREAM_LOST:
                return RequestCancelled(f"the stream of request {self.reservation} was lost")
            case EndCause.DEADLINE:
                return DeadlineExceeded(f"the deadline of request {self.reservation} has passed")
            case EndCause.NON_FINITE:
                return NumericalError(f"request {self.reservation} has NaN or infinite logits")
            case EndCause.NO_BLOCKS:
                return no_blocks_error(self.reservation)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Tell the operator: a writer has been able to write to these blocks for `age_s` seconds after it was given up."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey
    num_blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class DrainAndRestart:
    """Too much of the pool is in quarantine: finish what runs, then restart under a new epoch. Told once."""

    quarantined_blocks: int
    pool_blocks: int


@dataclass(frozen=True)
class FreeBlocks(Generic[B]):
    """Release the handle: nobody can write to its blocks. Carried out by `Reservations`."""

    blocks: B


@dataclass(frozen=True)
class QuarantineBlocks(Generic[B]):
    """Keep the handle from everyone until its writer cannot write any more. Carried out by `Reservations`."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey
    blocks: B


@dataclass(frozen=True, slots=True)
class WantBlocks:
    """Allocate for a new attempt and feed `NewBlocks` back. Carried out by `Reservations`."""

    cause: RetryCause


Action: TypeAlias = (
    Grant[B] | NewTarget | Refuse | AbortWriter | Land[B] | StartLocalPrefill[B] | End | Alarm | DrainAndRestart
)
"""What the worker carries out."""

PoolAction: TypeAlias = FreeBlocks[B] | QuarantineBlocks[B] | WantBlocks
"""What `Reservations` carries out itself."""


def no_blocks_error(reservation: ReservationId) -> Overloaded:
    """The error of a request that lost its first blocks to quarantine and found no others."""
    return Overloaded(
        f"the pool has no blocks for another attempt of request {reservation}", retry_after_s=NO_BLOCKS_RETRY_S
    )
