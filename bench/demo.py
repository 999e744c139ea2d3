"""`make demo`: a cluster of three services here, one streamed answer, its timings and who served it, a clean stop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster import Cluster, ClusterFailed
from paceline.checkpoint import resolve
from paceline.cli.output import counted
from paceline.client import Client, Finish, Message, ServerInfo, worker_info
from paceline.config import UpConfig, load
from paceline.errors import PacelineError
from paceline.types import Role, WorkerKey

QUESTION = "In two sentences: why do cyclists in a paceline ride close behind one another?"


def main(question: str) -> int:
    """Exit code: 0 if the answer came and the cluster stopped cleanly."""
    console = Console(highlight=False)
    settings = load(UpConfig, file=None, env=os.environ, flags={})
    resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline)
    console.print(f"[dim]$ paceline up --model {settings.model}")
    with Cluster(prefill=1, decode=1, metrics=False) as cluster, cluster.client() as client:
        console.print(f"[dim]ready after {cluster.ready_after_s:.1f} s at {cluster.router}[/]\n\n[bold]{question}[/]\n")
        finish = stream_answer(client, question)
        console.print()
        console.print(timings_of(finish))
        console.print(servers_of(client, finish))
        stopped_s = cluster.stop()
    console.print(f"[dim]stopped cleanly in {stopped_s:.1f} s[/]")
    return 0


def stream_answer(client: Client, question: str) -> Finish:
    """Prints the answer as it comes, and returns its end."""
    finish = None
    for chunk in client.chat([Message("user", question)], max_tokens=96, temperature=0.0, timeout=300):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        finish = chunk.finish or finish
    sys.stdout.write("\n")
    assert finish is not None
    return finish


def timings_of(finish: Finish) -> Table:
    """Tokens and times of the answer, as the router measured them."""
    table = Table(show_header=False, box=None)
    usage, timings, transfer = finish.usage, finish.timings, finish.transfer
    decoding_s = max(timings.total_s - timings.first_token_s, 1e-9)
    rate = (usage.completion_tokens - 1) / decoding_s
    table.add_row("prompt", f"{counted(usage.prompt_tokens, 'token')}, computed in {timings.prefill_s * 1000:.0f} ms")
    table.add_row(
        "first token",
        f"after {timings.first_token_s * 1000:.0f} ms, of them {timings.queued_s * 1000:.0f} ms in the queue",
    )
    table.add_row("answer", f"{counted(usage.completion_tokens, 'token')}, {rate:.1f} a second after the first")
    took = f", {transfer.duration_s * 1000:.1f} ms" if transfer.duration_s else ""
    moved = f"{counted(transfer.blocks, 'KV block')}, {transfer.bytes / 1e6:.2f} MB"
    table.add_row("hand-off", f"{moved} in {counted(transfer.parts, 'part')}{took}")
    return table


def servers_of(client: Client, finish: Finish) -> Table:
    """Which process did what, by the workers' own word."""
    table = Table("what", "worker", "processes (front, engine)", box=None)
    workers = {worker.key: worker for worker in client.loads().workers}

    def processes(key: WorkerKey, role: Role) -> ServerInfo:
        return worker_info(workers[key].address, role)

    for what, key, role in (
        ("prompt computed by", finish.prefill_worker, Role.PREFILL),
        ("tokens decoded by", finish.decode_worker, Role.DECODE),
    ):
        if key is not None:
            table.add_row(what, key.worker_id, ", ".join(map(str, processes(key, role).process_ids)))
    router = client.server_info()
    table.add_row("text and streaming", "router", ", ".join(map(str, router.process_ids)))
    return table


if __name__ == "__main__":
    try:
        sys.exit(main(" ".join(sys.argv[1:]) or QUESTION))
    except (PacelineError, ClusterFailed) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
