"""A front's handle on its engine process, with real processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from paceline.services.worker.process import EngineProcess


def process(code: str) -> EngineProcess:
    return EngineProcess(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE))


async def test_the_cpu_time_of_a_process_grows_while_it_computes_and_is_none_once_it_is_reaped() -> None:
    busy = process("while True: pass")
    try:
        before = busy.cpu_s
        async with asyncio.timeout(30.0):
            while busy.cpu_s < before + 0.05:  # noqa: ASYNC110  # the kernel tells nobody
                await asyncio.sleep(0.01)
    finally:
        assert await busy.stop(at_once=True) == -signal.SIGKILL
    assert busy.cpu_s == 0.0


async def test_a_process_that_waits_for_another_uses_what_that_one_uses() -> None:
    """As an engine does that has a kernel compiled."""
    busy = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    waiting = process(f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {busy!r}])")
    try:
        before = waiting.cpu_s
        async with asyncio.timeout(30.0):
            while waiting.cpu_s < before + 0.5:  # noqa: ASYNC110  # the kernel tells nobody
                await asyncio.sleep(0.01)
    finally:
        assert await waiting.stop(at_once=True) == -signal.SIGKILL


async def test_the_cpu_time_of_a_process_that_waits_does_not_grow() -> None:
    idle = process("import sys; sys.stdin.read()")
    try:
        async with asyncio.timeout(30.0):
            before = -1.0
            while idle.cpu_s != before:  # until it has started
                before = idle.cpu_s
                await asyncio.sleep(0.2)
    finally:
        assert await idle.stop() == 0
