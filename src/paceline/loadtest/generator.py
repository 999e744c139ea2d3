"""A generator process: its parent says what to send and when to start, and it reports what became of it.

Started as `python -m paceline.loadtest.generator` by `paceline.loadtest.fleet`. It ends when its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from typing import BinaryIO, Final

import uvloop

from paceline.errors import PacelineError
from paceline.loadtest.driver import Driver
from paceline.loadtest.frames import Assignment, Broken, Ready, Report, Start, Stop, read_from_parent, write
from paceline.loadtest.target import Clock, Target
from paceline.loadtest.targets import make_target
from paceline.loadtest.workload import Workload

_PROGRESS_S: Final = 0.25


def main() -> int:
    """0 after a report, 1 where the parent is gone or an error was reported."""
    try:
        return uvloop.run(_serve(sys.stdout.buffer))
    except asyncio.IncompleteReadError:
        return 1


async def _serve(out: BinaryIO) -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    assignment = await read_from_parent(reader)
    assert isinstance(assignment, Assignment)
    try:
        async with make_target(assignment.config, assignment.salt) as target:
            write(out, await _run(assignment, target, reader, out))
    except PacelineError as error:
        write(out, Broken(error.reason, error.message, error.metadata))
        return 1
    return 0


async def _run(assignment: Assignment, target: Target, reader: asyncio.StreamReader, out: BinaryIO) -> Report:
    config, info = assignment.config, assignment.info
    await target.describe()  # it connects, and knows the model from now on
    driver = Driver(
        Workload(config, vocab_size=info.vocab_size, context_tokens=info.context_tokens),
        target,
        mode=config.mode,
        places=_places(config.concurrency or 0, assignment.share, assignment.shares),
        share=assignment.share,
        shares=assignment.shares,
        slo=assignment.slo,
    )
    if assignment.warm:
        await driver.warm_up()
    driver.make_ready()
    # What is there now stays: the collector need not walk through it while answers are stamped.
    gc.collect()
    gc.freeze()
    write(out, Ready())
    start = await read_from_parent(reader)
    assert isinstance(start, Start)
    cpu_s = time.process_time()
    await _drive(driver, Clock(start.at), config.duration_s, reader, out)
    return Report(outcomes=driver.outcomes, cpu_s=time.process_time() - cpu_s, loop_lag_s=driver.loop_lag_s)


async def _drive(
    driver: Driver, clock: Clock, duration_s: float | None, reader: asyncio.StreamReader, out: BinaryIO
) -> None:
    """Until all has ended, or the parent says stop. The parent's death raises IncompleteReadError."""
    run = asyncio.create_task(driver.run(clock, duration_s))
    order = asyncio.create_task(read_from_parent(reader))
    try:
        while not run.done() and not order.done():
            await asyncio.wait({run, order}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            write(out, driver.progress)
        if order.done():
            assert isinstance(order.result(), Stop)
        else:
            run.result()
    finally:
        for task in (run, order):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
                await task


def _places(concurrency: int, share: int, shares: int) -> int:
    return concurrency // shares + (share < concurrency % shares)


if __name__ == "__main__":
    sys.exit(main())
