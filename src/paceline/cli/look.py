"""`paceline status`, `health` and `version`: what is running, and how it is."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline import __version__, client
from paceline.cli.output import explain, stdout_console
from paceline.client import AsyncClient, Balance, Client, Health, Loads, ServerInfo, Worker, worker_info_async
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost

_REFRESH_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.2
_EPOCH_DIGITS: Final = 6
_COLUMNS: Final = (
    "worker",
    "role",
    "address",
    "epoch",
    "pids",
    "run",
    "wait",
    "used/total",
    "committed",
    "quarantined",
    "heard",
)
_SHORT: Final = {"used/total": "used", "committed": "commit", "quarantined": "quar"}
_LEFT_OUT: Final = frozenset({"epoch", "pids"})
_ROOMY: Final = 105
_TEXTS: Final = frozenset({"worker", "role", "address"})


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` shows. `processes` has the workers that answered, front's pid first."""

    router: str
    server: ServerInfo
    loads: Loads
    processes: dict[str, tuple[int, ...]]


def status(arguments: argparse.Namespace) -> int:
    """One look at a router, or one every second."""
    if not arguments.watch:
        seen = asyncio.run(look(arguments.router))
        if arguments.json:
            print(msgspec.json.format(msgspec.json.encode(seen)).decode())
        else:
            console = stdout_console()
            console.print(render(seen, console.width))
        return 0
    with Live(console=stdout_console(), auto_refresh=False) as live:
        while True:
            live.update(_look_and_render(arguments.router, live.console.width), refresh=True)
            time.sleep(_REFRESH_S)


def _look_and_render(router: str, width: int) -> RenderableType:
    try:
        return render(asyncio.run(look(router)), width)
    except PacelineError as error:  # it may come back while one watches
        return Text(f"error: {explain(error)}", style="bold red")


async def look(router: str) -> Status:
    """Asks the router for everything, and each worker for its process ids."""
    async with AsyncClient(router) as connection:
        server, loads = await asyncio.gather(connection.server_info(), connection.loads())
    pids = await asyncio.gather(*(_pids(worker) for worker in loads.workers))
    processes = {str(worker.key): found for worker, found in zip(loads.workers, pids, strict=True) if found}
    return Status(router=router, server=server, loads=loads, processes=processes)


async def _pids(worker: Worker) -> tuple[int, ...]:
    with contextlib.suppress(PacelineError):
        return (await worker_info_async(worker.address, worker.role, timeout=1.0)).process_ids
    return ()


def render(seen: Status, width: int) -> RenderableType:
    """The table, under a line about the router. In few columns of text names and addresses stay whole, others go."""
    server, loads = seen.server, seen.loads
    pids = ", ".join(map(str, server.process_ids)) or "?"
    head = (
        f"router {seen.router} (pid {pids}), Paceline {server.version}, model {server.model}, "
        f"up {server.uptime_s:.0f} s: {loads.queued} queued, {loads.active} active"
    )
    rows = [
        dict(zip(_COLUMNS, _row(worker, seen.processes.get(str(worker.key), ())), strict=True))
        for worker in loads.workers
    ]
    short = width < _ROOMY
    left_out = set(_LEFT_OUT) if short else set()
    if short and all(row["worker"].startswith(row["role"]) for row in rows):
        left_out.add("role")  # the names say it
    columns = [column for column in _COLUMNS if column not in left_out]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in columns:
        name = _SHORT.get(column, column) if short else column
        table.add_column(name, justify="left" if column in _TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    lines = [Text(head), table if loads.workers else Text("no worker is registered", style="yellow")]
    if loads.workers and loads.obstacle is not None:
        lines.append(Text(f"no request can be placed: {loads.obstacle}", style="yellow"))
    return Group(*lines, *([] if loads.balance is None else [Text(_balance(loads.balance))]))


def _balance(balance: Balance) -> str:
    """What the tiers' speeds come to; a router that has seen little says little."""
    return (
        f"balance: {balance.prefill_per_decode:.2g} prefill workers to a decode worker. One computes "
        f"{balance.prefill_tokens_per_s:,.0f} prompt tokens/s, the other generates {balance.decode_tokens_per_s:,.0f} "
        f"with {balance.batch_requests:.0f} in its batch; requests of late have {balance.prompt_tokens:,.0f} tokens to "
        f"compute and {balance.generated_tokens:,.0f} to generate"
    )


def _row(worker: Worker, pids: tuple[int, ...]) -> tuple[str, ...]:
    load = worker.load
    return (
        worker.key.worker_id + (" (draining)" if worker.draining else ""),
        worker.role.value,
        worker.address,
        f"…{worker.key.epoch % 10**_EPOCH_DIGITS:0{_EPOCH_DIGITS}}",  # the whole of it is in the JSON
        "+".join(map(str, pids)) or "?",
        str(load.running),
        str(load.waiting),
        f"{load.total_blocks - load.free_blocks}/{load.total_blocks}",
        str(load.committed_blocks),
        str(load.quarantined_blocks),
        f"{worker.heartbeat_age_s:.1f} s",
    )


def health(arguments: argparse.Namespace) -> int:
    """0 where the server serves; with `--wait`, as soon as it does."""
    ends = time.monotonic() + (arguments.wait or 0.0)
    while True:
        is_last = time.monotonic() >= ends
        answer = _health(arguments, absent_is_unknown=not is_last)
        if is_last or answer is Health.SERVING:
            break
        time.sleep(_LOOK_EVERY_S)
    why = None if answer is Health.SERVING else _obstacle(arguments.address)
    print(answer.value if why is None else f"{answer.value}: {why}")
    return 0 if answer is Health.SERVING else 1


def _health(arguments: argparse.Namespace, *, absent_is_unknown: bool) -> Health:
    try:
        return client.health(arguments.address, service=arguments.service, timeout=arguments.timeout)
    except (WorkerLost, DeadlineExceeded):
        if absent_is_unknown:
            return Health.UNKNOWN
        raise


def _obstacle(address: str) -> str | None:
    """What a router that does not serve lacks; None where it does not say, or the server is none."""
    with contextlib.suppress(PacelineError), Client(address) as connection:
        return connection.loads().obstacle
    return None


VERSION: Final = f"paceline {__version__} (Python {sys.version.partition(' ')[0]})"


def version(arguments: argparse.Namespace) -> int:
    """Paceline's version, and Python's."""
    print(VERSION)
    return 0
