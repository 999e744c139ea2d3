"""Keeps roles alive: starts each, restarts what dies, stops all in order. It sleeps until a child ends or it is told.

A run ends in one of two ways: `stop` was called (the result is None), or a role gave cause to give up (a `Failure`).
Either way every process is gone by then. Roles that stop last are asked, with their grace, when the others are gone:
the workers, so that the router takes nothing new, and what it has under way ends while they are at work.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from paceline.cli.child import Child
from paceline.cli.restarts import STARTUP_STATUS, GiveUp, RestartPolicy

KEPT_LINES: Final = 20
_KILL_MARGIN_S: Final = 5.0


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep running. `name` is unique, such as router or prefill-0."""

    name: str
    command: tuple[str, ...]
    stops_last: bool = False


class Started(msgspec.Struct, frozen=True):
    """A role's process was started."""

    name: str
    pid: int


class Died(msgspec.Struct, frozen=True):
    """A role's process ended by itself, and is started again after `restart_in_s`."""

    name: str
    status: int
    restart_in_s: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a supervisor gave up. `lines` are the role's last output."""

    name: str
    status: int
    cannot_start: bool
    lines: tuple[str, ...]

    def describe(self) -> str:
        """What happened, for people, in one line."""
        how = describe_status(self.status)
        return f"{self.name} cannot start ({how})" if self.cannot_start else f"{self.name} keeps dying ({how})"


Event = Started | Died


def describe_status(status: int) -> str:
    """`exit status 3`, or `signal 9`."""
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


class _Role:
    def __init__(self, spec: RoleSpec, policy: RestartPolicy) -> None:
        self.spec = spec
        self.policy = policy
        self.child: Child | None = None
        self.has_served = False
        self.was_asked_to_stop = False
        self.last_status: int | None = None
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.over = asyncio.Event()

    @property
    def ended_well(self) -> bool:
        # A process that is still starting has no handler for SIGTERM yet.
        return self.last_status == 0 or (not self.has_served and self.last_status == -signal.SIGTERM)


class Supervisor:
    """Keeps `specs` running. To be made and used on one event loop; `run` is awaited once."""

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        *,
        grace_s: float,
        max_deaths: int = 5,
        window_s: float = 60.0,
        on_line: Callable[[str, bytes], None] = lambda name, line: None,
        on_event: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roles = {
            spec.name: _Role(spec, RestartPolicy(max_deaths=max_deaths, window_s=window_s)) for spec in specs
        }
        self._grace_s = grace_s
        self._on_line = on_line
        self._on_event = on_event
        self._clock = clock
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._failure: Failure | None = None

    async def run(self) -> Failure | None:
        """Starts all roles and keeps them, until `stop` or a failure; then stops them, and returns."""
        keepers = [asyncio.create_task(self._keep(role), name=name) for name, role in self._roles.items()]
        await self._stopping.wait()
        await self._stop_roles(role for role in self._roles.values() if not role.spec.stops_last)
        await self._stop_roles(role for role in self._roles.values() if role.spec.stops_last)
        await asyncio.gather(*keepers)
        return self._failure

    def stop(self) -> None:
        """Asks for the end: the first call with grace, a second one at once."""
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()

    def mark_served(self) -> None:
        """Says that all roles serve: from now on one that cannot start is tried again like any that died."""
        for role in self._roles.values():
            role.has_served = True

    def pid(self, name: str) -> int | None:
        """The process of a role, None between two lives."""
        child = self._roles[name].child
        return None if child is None else child.pid

    def last_status(self, name: str) -> int | None:
        """Exit status of the role's last life that has ended, negative for a signal."""
        return self._roles[name].last_status

    @property
    def unclean(self) -> tuple[str, ...]:
        """Roles that were running when all was stopped and did not exit with 0. For after `run`."""
        return tuple(name for name, role in self._roles.items() if role.was_asked_to_stop and not role.ended_well)

    async def _keep(self, role: _Role) -> None:
        try:
            while not self._stopping.is_set():
                status = await self._live(role)
                if self._stopping.is_set():
                    return
                verdict = role.policy.on_death(status, now=self._clock(), has_served=role.has_served)
                if isinstance(verdict, GiveUp):
                    self._fail(role, status, cannot_start=verdict.cannot_start)
                    return
                self._on_event(Died(role.spec.name, status, verdict.delay_s))
                await _wait(self._stopping, verdict.delay_s)
        finally:
            role.over.set()
            self._stopping.set()  # a keeper ends early only on a failure, or on an error of ours

    async def _live(self, role: _Role) -> int:
        def on_line(line: bytes) -> None:
            role.lines.append(line.decode("utf-8", "replace"))
            self._on_line(role.spec.name, line)

        try:
            role.child = await Child.start(role.spec.command, on_line)
        except OSError as error:
            role.lines.append(f"{role.spec.command[0]}: {error.strerror}")
            return STARTUP_STATUS
        self._on_event(Started(role.spec.name, role.child.pid))
        if self._stopping.is_set():  # it came while the process was being started, and found no child to ask
            role.child.terminate()
        role.last_status = await role.child.wait()
        role.child = None
        return role.last_status

    def _fail(self, role: _Role, status: int, *, cannot_start: bool) -> None:
        if self._failure is None:
            self._failure = Failure(
                name=role.spec.name, status=status, cannot_start=cannot_start, lines=tuple(role.lines)
            )

    async def _stop_roles(self, roles: Iterable[_Role]) -> None:
        await asyncio.gather(*(self._stop_role(role) for role in roles))

    async def _stop_role(self, role: _Role) -> None:
        if role.child is not None:
            role.was_asked_to_stop = True
            role.child.terminate()
        over = asyncio.create_task(role.over.wait())
        killing = asyncio.create_task(self._killing.wait())
        await asyncio.wait((over, killing), timeout=self._grace_s + _KILL_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if role.child is not None:
            role.child.kill()
        await over


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Sleeps, or less when the event comes first."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
