"""The choices of a request: each is a request of its own to the engine, over shared blocks of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import FinishReason, RequestId, ReservationId


@dataclass(slots=True)
class Choice:
    """One answer of a request."""

    told: int = 0  # output tokens that the front has
    finish: FinishReason | None = None  # set once it is over
    running: RequestId | None = None  # what the engine knows it by, while it does


def engine_id(reservation: ReservationId, choice: int, choices: int) -> RequestId:
    """What the engine knows a choice by. A request of one choice keeps its name."""
    return RequestId(reservation if choices == 1 else f"{reservation}#{choice}")
