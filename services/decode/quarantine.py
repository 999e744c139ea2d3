"""Blocks of attempts that were given up while their writer could still write.

A writer that was stopped, and resumed after its blocks had been reused, does overwrite them. So blocks leave quarantine
only when their writer has said that every handle is terminal, or is proven dead. Time frees nothing: it only asks the
writer again, alarms, and restarts the worker once too many blocks are stuck. Each cancelled hand-off passes through
here on its way back, for about a second: only what is left after the alarm counts as stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from paceline.services.decode.reservation_actions import AbortWriter, Alarm, DrainAndRestart, QuarantineBlocks
from paceline.services.decode.reservation_events import B
from paceline.services.decode.timers import Timers
from paceline.types import ReservationId, WorkerKey

ALARM_S = 30.0
"""Seconds in quarantine after which the operator is told."""
ASK_AGAIN_S = 5.0
"""Seconds after which a writer is asked again to stop: the first call, or its answer, may be lost."""
DRAIN_FRACTION = 0.05
"""Share of the pool stuck in quarantine above which the worker drains and restarts."""


@dataclass(frozen=True, slots=True)
class QuarantineKey:
    """One attempt's writes by one life of a worker: what a report must name exactly."""

    reservation: ReservationId
    attempt: int
    writer: WorkerKey


@dataclass(slots=True)
class _Entry(Generic[B]):
    blocks: B
    since: float
    alarmed: bool = False


class Quarantine(Generic[B]):
    """The handles in quarantine, each released exactly once: when its entry is popped."""

    def __init__(self, pool_blocks: int, *, alarm_s: float = ALARM_S, drain_fraction: float = DRAIN_FRACTION) -> None:
        self._pool_blocks = pool_blocks
        self._alarm_s = alarm_s
        self._drain_fraction = drain_fraction
        self._entries: dict[QuarantineKey, _Entry[B]] = {}
        self._timers: Timers[QuarantineKey] = Timers()
        self._num_blocks = 0
        self._stuck_blocks = 0  # of them, those of attempts that have alarmed
        self._draining = False

    def __len__(self) -> int:
        """Attempts in quarantine."""
        return len(self._entries)

    @property
    def num_blocks(self) -> int:
        """Blocks in quarantine."""
        return self._num_blocks

    def holds(self, reservation: ReservationId) -> bool:
        """True while an attempt of this reservation is in quarantine."""
        return any(key.reservation == reservation for key in self._entries)

    def add(self, order: QuarantineBlocks[B], now: float) -> None:
        """Takes the handle over."""
        key = QuarantineKey(order.reservation, order.attempt, order.writer)
        assert key not in self._entries, f"{key} is in quarantine already"
        self._entries[key] = _Entry(order.blocks, since=now)
        self._timers.set(key, now + min(ASK_AGAIN_S, self._alarm_s))
        self._num_blocks += len(order.blocks)

    def writer_terminal(self, key: QuarantineKey) -> bool:
        """Frees that attempt's blocks; False where it is not here."""
        if key not in self._entries:
            return False
        self._release(key)
        return True

    def writers_dead(self, is_dead: Callable[[WorkerKey], bool]) -> int:
        """Frees the blocks of every writer that is proven dead; returns how many attempts that were."""
        dead = [key for key in self._entries if is_dead(key.writer)]
        for key in dead:
            self._release(key)
        return len(dead)

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do, in monotonic seconds."""
        return self._timers.next()

    def expire(self, now: float) -> list[AbortWriter | Alarm | DrainAndRestart]:
        """Asks writers again to stop, tells of each attempt once that it is stuck, and of too many once in all."""
        actions: list[AbortWriter | Alarm | DrainAndRestart] = []
        for key in self._timers.pop_due(now):
            entry = self._entries[key]
            alarm_at = entry.since + self._alarm_s
            actions.append(AbortWriter(key.reservation, key.attempt, key.writer))
            if not entry.alarmed and now >= alarm_at:
                entry.alarmed = True
                self._stuck_blocks += len(entry.blocks)
                age = now - entry.since
                actions.append(Alarm(key.reservation, key.attempt, key.writer, len(entry.blocks), age))
            ask_at = now + ASK_AGAIN_S
            self._timers.set(key, ask_at if entry.alarmed else min(ask_at, alarm_at))
        if not self._draining and self._stuck_blocks > self._drain_fraction * self._pool_blocks:
            self._draining = True
            actions.append(DrainAndRestart(self._stuck_blocks, self._pool_blocks))
        return actions

    def _release(self, key: QuarantineKey) -> None:
        entry = self._entries.pop(key)
        self._timers.cancel(key)
        self._num_blocks -= len(entry.blocks)
        if entry.alarmed:
            self._stuck_blocks -= len(entry.blocks)
        entry.blocks.release()
