"""One role as a process of its own session: its log lines come here, and it is gone only when its whole group is.

A role is a front and perhaps an engine, in one process group. A terminal's Ctrl-C does not reach the group; `terminate`
asks the front alone, which ends its engine. A role that ended is waited for as a group, so that a next life never meets
the memory, the port or the lock of the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

_PR_SET_PDEATHSIG: Final = 1
_GROUP_EXIT_S: Final = 2.0  # a pair dies together within this time
_GROUP_KILL_S: Final = 10.0
_POLL_S: Final = 0.02
_LONGEST_LINE: Final = 65_536


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it dies; exits if `parent` is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Child:
    """A started process. `wait` must be awaited once, to its end."""

    def __init__(self, process: subprocess.Popen[bytes], pump: _LinePump, transport: asyncio.BaseTransport) -> None:
        self._process = process
        self._pump = pump
        self._transport = transport
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Sequence[str], on_line: Callable[[bytes], None]) -> Child:
        """Starts `command`; `on_line` gets each line of its output and errors, without the line's end."""
        process, pipe = _start(command)
        transport, pump = await asyncio.get_running_loop().connect_read_pipe(lambda: _LinePump(on_line), pipe)
        return cls(process, pump, transport)

    async def wait(self) -> int:
        """The exit status, negative for a signal, when process and group have ended and their output is read."""
        await _ended(self.pid)
        # The leader is a zombie until it is reaped, which keeps its number, and so the group's, from being reused.
        await self._end_group()
        status = self._process.wait()
        _reap_group(self.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GROUP_EXIT_S):
                await self._pump.ended.wait()
        self._transport.close()
        return status

    def terminate(self) -> None:
        """Asks the process to finish what it has and exit."""
        # Straight to kill(2): Popen's own method reaps a process that has ended, and `wait` is to do that.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends the whole group at once."""
        if self._process.returncode is None:  # else the number may be another group's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _end_group(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        killed = False
        while self._others_left():
            waited = loop.time() - started
            if waited > _GROUP_EXIT_S and not killed:
                killed = True
                self.kill()
            if waited > _GROUP_EXIT_S + _GROUP_KILL_S:
                return
            await asyncio.sleep(_POLL_S)

    def _others_left(self) -> bool:
        return any(pid != self.pid for pid in group_members(self.pid))


def _start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    # Not asyncio's own subprocesses: they reap the leader before its group can be looked at.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout


def group_members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    members = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (process / "stat").read_text(encoding="ascii", errors="replace")
                state, _parent, of_group = stat.rpartition(")")[2].split()[:3]
                if int(of_group) == group and state not in "ZX":
                    members.append(int(process.name))
    return members


def _reap_group(group: int) -> None:
    # Orphans become children of process 1, and in a container that may be this process.
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass


async def _ended(pid: int) -> None:
    """Sleeps until the process has ended, without reaping it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class _LinePump(asyncio.Protocol):
    """Splits what it reads into lines; a line of any length is cut into pieces rather than kept."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest)
        self.ended.set()
