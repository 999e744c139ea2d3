"""The supervisor with small real processes: shells and Pythons that exit, sleep or disobey."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import restarts
from paceline.cli.child import Child, group_members
from paceline.cli.supervisor import Died, Event, Failure, RoleSpec, Started, Supervisor

WAIT_S = 20.0


def sh(name: str, script: str, *, last: bool = False) -> RoleSpec:
    return RoleSpec(name=name, command=("sh", "-c", script), stops_last=last)


class Watch:
    """Records what a supervisor tells, and waits for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lines: list[tuple[str, bytes]] = []
        self._changed = asyncio.Event()

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    def _on_line(self, name: str, line: bytes) -> None:
        self.lines.append((name, line))
        self._changed.set()

    def supervisor(self, *specs: RoleSpec, grace_s: float = 5.0, max_deaths: int = 5) -> Supervisor:
        return Supervisor(
            specs,
            grace_s=grace_s,
            max_deaths=max_deaths,
            on_event=self._on_event,
            on_line=self._on_line,
        )

    def started(self, name: str) -> list[int]:
        return [event.pid for event in self.events if isinstance(event, Started) and event.name == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def test_stop_ends_every_role_and_reports_no_failure() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "exec sleep 60"), sh("b", "exec sleep 60", last=True))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: len(watch.events) == 2)
    supervisor.stop()
    assert await run is None
    assert not any(alive(pid) for name in "ab" for pid in watch.started(name))
    assert supervisor.last_status("a") == -signal.SIGTERM
    assert supervisor.pid("a") is None


async def test_the_router_is_asked_to_stop_only_when_the_workers_are_gone() -> None:
    watch = Watch()
    slow = "trap 'sleep 0.3; echo gone; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    supervisor = watch.supervisor(sh("router", slow, last=True), sh("p", slow), sh("d", slow))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: sum(line == b"up" for _, line in watch.lines) == 3)
    supervisor.stop()
    await run
    assert [name for name, line in watch.lines if line == b"gone"][-1] == "router"
    assert {supervisor.last_status(name) for name in ("router", "p", "d")} == {0}


async def test_a_dead_role_is_started_again_under_the_same_command() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "exec sleep 60"))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: len(watch.started("a")) == 1)
    os.kill(watch.started("a")[0], signal.SIGKILL)
    await watch.until(lambda: len(watch.started("a")) == 2)
    assert watch.events[1] == Died("a", -9, 0.2)
    assert supervisor.pid("a") == watch.started("a")[1]
    supervisor.stop()
    assert await run is None


async def test_too_many_deaths_stop_everything_and_name_the_role_its_status_and_its_last_words() -> None:
    watch = Watch()
    supervisor = watch.supervisor(
        sh("good", "exec sleep 60"), sh("bad", "echo first; echo last words >&2; exit 3"), max_deaths=3
    )
    failure = await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert failure == Failure(name="bad", status=3, cannot_start=False, lines=("first", "last words") * 3)
    assert failure.describe() == "bad keeps dying (exit status 3)"
    assert [event.restart_in_s for event in watch.events if isinstance(event, Died)] == [0.2, 0.4]
    assert not alive(watch.started("good")[0])


async def test_a_role_that_cannot_start_ends_everything_at_once() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("good", "exec sleep 60"), sh("bad", "echo port in use; exit 2"))
    failure = await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert failure == Failure(name="bad", status=2, cannot_start=True, lines=("port in use",))
    assert len(watch.started("bad")) == 1


async def test_a_role_that_has_served_may_fail_to_start_for_a_while() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "sleep 0.1; exit 2"), max_deaths=3)
    supervisor.mark_served()
    failure = await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert failure is not None
    assert not failure.cannot_start
    assert len(watch.started("a")) == 3


async def test_a_command_that_does_not_exist_is_a_failure_to_start() -> None:
    supervisor = Watch().supervisor(RoleSpec(name="a", command=("/does/not/exist",)))
    failure = await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert failure is not None
    assert failure.cannot_start
    assert "/does/not/exist" in failure.lines[0]


async def test_stop_ends_the_wait_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(restarts, "LONGEST_DELAY_S", 600.0)
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "exit 1"))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: any(isinstance(event, Died) for event in watch.events))
    supervisor.stop()
    assert await asyncio.wait_for(run, WAIT_S) is None


async def test_a_second_stop_kills_what_does_not_listen() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "trap '' TERM; echo up; while :; do sleep 0.05; done"), grace_s=600)
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: bool(watch.lines))
    supervisor.stop()
    await asyncio.sleep(0.1)
    assert not run.done()
    supervisor.stop()
    assert await asyncio.wait_for(run, WAIT_S) is None
    assert supervisor.last_status("a") == -signal.SIGKILL


async def test_a_restart_waits_until_the_whole_group_of_the_last_life_is_gone() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "sleep 60 & echo $!; wait"))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: len(watch.lines) == 1)
    orphan = int(watch.lines[0][1])
    os.kill(watch.started("a")[0], signal.SIGKILL)
    await watch.until(lambda: len(watch.started("a")) == 2)
    assert not alive(orphan)
    supervisor.stop()
    await run
    assert group_members(watch.started("a")[1]) == []


async def test_roles_are_out_of_reach_of_the_terminals_signals() -> None:
    watch = Watch()
    supervisor = watch.supervisor(sh("a", "exec sleep 60"))
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: bool(watch.events))
    pid = watch.started("a")[0]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    supervisor.stop()
    await run


async def test_lines_are_whole_however_they_are_written_and_long_ones_are_cut() -> None:
    lines: list[bytes] = []
    script = "import sys; w=sys.stdout.write; w('a'); w('b\\n'); w('x' * 200_000); w('\\nno end')"
    child = await Child.start((sys.executable, "-c", script), lines.append)
    assert await child.wait() == 0
    assert (lines[0], lines[-1]) == (b"ab", b"no end")
    assert b"".join(lines[1:-1]) == b"x" * 200_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_roles_die_with_their_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    child = f"""
        import os, sys, time
        from paceline.cli.child import die_with_parent
        die_with_parent(int(sys.argv[1]))
        open({str(pid_file)!r} + '.new', 'w').write(str(os.getpid()))
        os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r})
        time.sleep(600)
    """
    parent = f"""
        import asyncio, os, sys
        from paceline.cli.supervisor import RoleSpec, Supervisor
        command = (sys.executable, '-c', {textwrap.dedent(child)!r}, str(os.getpid()))
        async def main():
            await Supervisor([RoleSpec(name='a', command=command)], grace_s=1).run()
        asyncio.run(main())
    """
    supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)])
    try:
        assert eventually(pid_file.exists)
        role = int(pid_file.read_text())
        assert alive(role)
        supervisor.send_signal(number)
        assert eventually(lambda: not alive(role))
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_role_whose_supervisor_is_dead_already_exits_at_once() -> None:
    script = "from paceline.cli.child import die_with_parent; die_with_parent(999_999_999); print('lives on')"
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=WAIT_S)
    assert (run.returncode, run.stdout) == (1, "")
