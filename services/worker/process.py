"""How a front and its engine process live and die together.

The engine is spawned (a new interpreter, never a fork of this one). Its standard input is a pipe from the front: the
first line is its `Birth`, and end-of-file means that the front is gone. Besides, the kernel kills it when the front
dies (parent-death signal), also while it computes. The other way round, the front watches it and exits when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from paceline.types import WorkerKey

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NS: Final = 1_000
_KILL_AFTER_S: Final = 5.0
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")

_SPINS: Final = "2000"
"""Rounds of a fraction of a microsecond that a thread waits for the others of its step before it sleeps.

That spans the gaps within a step. OpenMP's own default, some milliseconds, takes the core from the very thread that is
waited for, wherever other processes want it: the other tier is one.
"""

C = TypeVar("C", bound=msgspec.Struct)


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told at its start."""

    worker: WorkerKey
    link_dir: str
    config: dict[str, Any]

    @classmethod
    def of(cls, worker: WorkerKey, link_dir: str, config: msgspec.Struct) -> Birth:
        """The birth of an engine with this configuration."""
        return cls(worker=worker, link_dir=link_dir, config=msgspec.to_builtins(config, enc_hook=str))

    def configured(self, kind: type[C]) -> C:
        """The configuration, as the front had it."""
        return msgspec.convert(self.config, kind, dec_hook=lambda wanted, value: wanted(value))


class EngineProcess:
    """The front's handle on its engine process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pid_file = os.pidfd_open(process.pid)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pid_file, self._reap)
        self.pid = process.pid

    @classmethod
    def spawn(cls, module: str, birth: Birth, *, inherit: tuple[int, ...]) -> EngineProcess:
        """Starts `python -m module` from the running loop; `inherit` are descriptors that it holds for life."""
        # -P: the working directory must not shadow packages.
        command = [sys.executable, "-P", "-m", module]
        # OpenMP reads it when it is loaded, which is before the engine could say so itself.
        environment = {"GOMP_SPINCOUNT": _SPINS} | os.environ
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherit, env=environment)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died at once is seen by `wait`, with its status
            process.stdin.write(msgspec.json.encode(birth) + b"\n")
            process.stdin.flush()
        return cls(process)

    async def wait(self) -> int:
        """The exit status, when the process has ended; negative for a signal."""
        return await asyncio.shield(self._ended)

    @property
    def cpu_s(self) -> float:
        """CPU time that it and the processes under it have used, in seconds, to a hundredth; 0 once it was reaped.

        While it waits for a compiler, it uses none itself.
        """
        return 0.0 if self._ended.done() else _cpu_ticks(self.pid) / _TICKS_A_SECOND

    def kill(self) -> None:
        """Ends the process now, if it has not ended."""
        self._process.kill()

    async def stop(self, *, at_once: bool = False) -> int:
        """Ends the process: closing the pipe asks it to, and a kill follows if it does not listen, or is `at_once`."""
        if at_once:
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                return await self.wait()
        except TimeoutError:
            self._process.kill()
            return await self.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_file)
        os.close(self._pid_file)
        self._ended.set_result(self._process.wait())


def _cpu_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended
        return 0
    own_and_reaped = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, own_and_reaped)) + sum(map(_cpu_ticks, _children(pid)))


def _children(pid: int) -> list[int]:
    """Processes that its threads started and have not reaped."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, children.read_text(encoding="ascii").split())
    return found


def wake_in_time() -> None:
    """From now on this thread's sleeps end on time: the kernel lets them last 50 us longer else, to save energy."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _SLACK_NS)


def be_born() -> Birth:
    """The engine's first act: die with the parent, leave Ctrl-C to it, and read the birth line."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was asked for
        sys.exit(0)
    # The front alone decides what a signal to the whole group means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered, so that select() sees the pipe as it is
        piece = os.read(0, 65536)
        if not piece:
            sys.exit(0)
        line += piece
    return msgspec.json.decode(bytes(line), type=Birth)
