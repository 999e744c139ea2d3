"""`--stats`: where a request's time went and which processes served it."""

from __future__ import annotations

import contextlib
import json
import sys

from rich.table import Table

from paceline.cli.output import byte_size, counted, milliseconds, stderr_console
from paceline.client import Client, Completion, Finish, TransferSummary, Worker, worker_info
from paceline.errors import PacelineError
from paceline.types import WorkerKey


def print_stats(client: Client, answer: Completion) -> None:
    """Prints the table to stderr. Process ids are asked of the workers, and left out where they do not answer."""
    with contextlib.suppress(PacelineError):
        workers = {worker.key: worker for worker in client.loads().workers}
        stderr_console().print(stats_table(answer.finish, workers))
        return
    stderr_console().print(stats_table(answer.finish, {}))


def print_logprobs(answer: Completion) -> None:
    """Prints to stderr what was asked for: a line for each token, with the likeliest ones at its place."""
    lines = [("prompt", each) for each in answer.prompt_logprobs]
    for number, choice in enumerate(answer.choices):
        lines += [(f"choice {number}", each) for each in choice.logprobs]
    for where, logprob in lines:
        texts = logprob.top_texts or (None,) * len(logprob.top)
        top = ", ".join(
            f"{_token(token_id, text)} {value:.4f}" for (token_id, value), text in zip(logprob.top, texts, strict=True)
        )
        print(f"{where}  {_token(logprob.token_id, logprob.text)} {logprob.logprob:.4f}  [{top}]", file=sys.stderr)
    for number, choice in enumerate(answer.choices):
        if choice.cumulative_logprob is not None:
            print(f"choice {number}  sum {choice.cumulative_logprob:.4f}", file=sys.stderr)


def _token(token_id: int, text: str | None) -> str:
    """`278 " the"`: quoted, so that spaces and line ends are seen; the id alone where there is no text."""
    return str(token_id) if text is None else f"{token_id} {json.dumps(text, ensure_ascii=False)}"


def stats_table(finish: Finish, workers: dict[WorkerKey, Worker]) -> Table:
    """Tokens, times, the hand-off, and who did it."""
    usage, timings, transfer = finish.usage, finish.timings, finish.transfer
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_row("prompt", f"{counted(usage.prompt_tokens, 'token')}, {usage.cached_tokens} of them cached")
    table.add_row(
        "answer", f"{counted(usage.completion_tokens, 'token')}, {_rate(finish)}, ended by {finish.reason.value}"
    )
    queued = milliseconds(timings.queued_s)
    table.add_row("first token", f"after {milliseconds(timings.first_token_s)}; placed after {queued}")
    table.add_row("total", milliseconds(timings.total_s))
    if finish.prefill_worker is None:
        table.add_row("prefill", f"on the decode worker, {counted(finish.prompt_tokens_computed_on_decode, 'token')}")
    else:
        table.add_row("prefill", f"{_process(finish.prefill_worker, workers)}, {milliseconds(timings.prefill_s)}")
        table.add_row("KV moved", _moved(transfer, finish.attempts))
    if finish.decode_worker is not None:
        table.add_row("decode", _process(finish.decode_worker, workers))
    return table


def _moved(transfer: TransferSummary, attempts: int) -> str:
    parts = counted(transfer.parts, "part")
    text = f"{counted(transfer.blocks, 'block')}, {byte_size(transfer.bytes)} in {parts}"
    if transfer.parts > 1:  # of a single part there is no spread to tell
        spread = milliseconds(transfer.duration_s)
        text += f" over {spread}, {transfer.parts_before_last_chunk} of them before the last chunk"
    if transfer.held_blocks:
        text += f", {counted(transfer.held_blocks, 'block')} there already"
    return f"{text}, attempt {attempts}"


def _rate(finish: Finish) -> str:
    decoding_s = finish.timings.total_s - finish.timings.first_token_s
    if finish.usage.completion_tokens < 2 or decoding_s <= 0:
        return "one step"
    return f"{(finish.usage.completion_tokens - 1) / decoding_s:.1f} tokens/s after the first"


def _process(key: WorkerKey, workers: dict[WorkerKey, Worker]) -> str:
    worker = workers.get(key)
    if worker is None:
        return f"{key} (gone)"
    with contextlib.suppress(PacelineError):
        pids = worker_info(worker.address, worker.role, timeout=1.0).process_ids
        return f"{key} at {worker.address}, pids {' and '.join(map(str, pids))}"
    return f"{key} at {worker.address}"
