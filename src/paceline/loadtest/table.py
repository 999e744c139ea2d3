"""A result as tables for people: times in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.loadtest.config import Mode, Slo
from paceline.loadtest.measure import Found, Result
from paceline.loadtest.outcome import STOPPED
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.summary import SLO_PERCENT, Handovers, Throughput

_LATENCIES = (
    ("time to first token", "ttft_s"),
    ("inter-token latency", "itl_s"),
    ("time per output token", "tpot_s"),
    ("end to end", "e2e_s"),
    ("lateness of sending", "lateness_s"),
)


def result_table(result: Result) -> RenderableType:
    """Latencies, then counts and rates, then pools; what went wrong is in red below."""
    parts: list[RenderableType] = [Text(_title(result))]
    if result.interrupted:
        parts.append(Text("interrupted: the figures so far", style="yellow"))
    latencies = _latencies(result)
    if latencies.row_count:  # else nothing was answered
        parts.append(latencies)
    parts.append(_counts(result))
    if result.pools:
        parts.append(_pools(result))
    summary = result.summary
    for reason, count in summary.errors.items():
        if reason == STOPPED and result.interrupted:
            continue  # whoever interrupted knows
        parts.append(Text(f"{count} x {reason}: {' '.join(summary.first_errors[reason].split())}", style="red"))
    parts += map(_warning, result.warnings)
    return Group(*parts)


def search_table(found: Found) -> RenderableType:
    """A line for each run of a search, by rate."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rate /s", "good", "TTFT p99 ms", "ITL p99 ms", "tokens/s", ""):
        table.add_column(column, justify="right")
    for probe in sorted(found.probes, key=lambda probe: probe.rate):
        summary = probe.result.summary
        assert summary.goodput is not None
        verdict = "well" if probe.well else "given up" if probe.result.stopped else "too few"
        table.add_row(
            f"{probe.rate:.4g}",
            f"{summary.goodput.share:.1%}",
            _ms(summary.ttft_s.p99 if summary.ttft_s else None),
            _ms(summary.itl_s.p99 if summary.itl_s else None),
            f"{summary.whole.tokens_per_s:,.0f}",
            verdict,
        )
    rate = "no rate that was tried" if found.rate is None else f"{found.rate:.4g} requests/s"
    if found.interrupted:
        rate += ", as far as the search came"
    # The answer is as good as the run that went wrong at the next rate.
    failed = min((probe for probe in found.probes if not probe.well), key=lambda probe: probe.rate, default=None)
    doubts = [] if failed is None else [f"at {failed.rate:.4g}/s {each}" for each in failed.result.warnings]
    return Group(table, *map(_warning, doubts), Text(f"goodput: {rate}", style="bold"))


def _warning(text: str) -> Text:
    return Text(f"warning: {text}", style="yellow")


def _title(result: Result) -> str:
    config = result.config
    match config.mode:
        case Mode.OPEN:
            load = f"open loop at {config.rate:g} requests/s"
        case Mode.CLOSED:
            load = f"closed loop of {config.concurrency}"
        case Mode.TRACE:
            load = f"replay of {config.trace}"
    return f"{result.info.model} at {result.info.address}: {load}, seed {config.seed}"


def _latencies(result: Result) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("ms", style="dim")
    for column in ("mean", "p50", "p90", "p99", "max", "count"):
        table.add_column(column, justify="right")
    for name, field in _LATENCIES:
        found: Distribution | None = getattr(result.summary, field)
        if found is not None:
            values = (found.mean, found.p50, found.p90, found.p99, found.max)
            table.add_row(name, *map(_ms, values), f"{found.count:,}")
    return table


def _counts(result: Result) -> Table:
    summary = result.summary
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    failed = summary.sent - summary.succeeded - summary.stopped
    stopped = f", {summary.stopped:,} under way at the stop" if summary.stopped else ""
    table.add_row("requests", f"{summary.succeeded:,} answered, {failed:,} failed{stopped}")
    cached = f", {summary.cached_tokens:,} of them cached" if summary.cached_tokens else ""
    table.add_row("tokens", f"{summary.input_tokens:,} in prompts{cached}; {summary.output_tokens:,} in answers")
    if summary.tokens_per_message is not None:
        table.add_row("tokens a message", f"{summary.tokens_per_message:.2f}")
    table.add_row("throughput", _throughput(summary.whole))
    if summary.steady is not None:
        table.add_row("in steady state", _throughput(summary.steady))
    if summary.goodput is not None:
        goodput = summary.goodput
        rate = f"{goodput.requests_per_s:.3g} requests/s, {goodput.share:.1%} of all"
        table.add_row("goodput", f"{rate} ({_slo(goodput.slo)})")
    if summary.handovers is not None:
        for name, text in _handover_rows(summary.handovers):
            table.add_row(name, text)
    busy = ", ".join(f"{use.cpu_share:.0%}" for use in result.generators)
    table.add_row("generator", f"{busy} of a core each" if len(result.generators) > 1 else f"{busy} of a core")
    return table


def _handover_rows(handovers: Handovers) -> Iterator[tuple[str, str]]:
    text = f"{handovers.through_prefill:,} on prefill workers"
    if handovers.computed_on_decode:
        tokens = f"{handovers.tokens_computed_on_decode:,} tokens"
        text += f"; {handovers.computed_on_decode:,} on decode workers, {tokens}"
    yield "prompts computed", text
    if handovers.blocks:
        moved = f"{handovers.blocks:,} blocks, {handovers.bytes / 2**20:,.1f} MiB"
        held = f", {handovers.held_blocks:,} there already" if handovers.held_blocks else ""
        spread = "" if handovers.transfer_s is None else f", over {_ms(handovers.transfer_s.p50)} ms (p50)"
        retried = f", {handovers.retried:,} retried" if handovers.retried else ""
        yield "KV moved", moved + held + spread + retried
    for name, found in (("queued", handovers.queued_s), ("prefill", handovers.prefill_s)):
        if found is not None:
            yield name, f"p50 {_ms(found.p50)} ms, p99 {_ms(found.p99)} ms (the router's clock)"


def _pools(result: Result) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("pool", style="dim")
    for column in ("used, mean", "used, max", "running, mean", "running, max", "waiting, max"):
        table.add_column(column, justify="right")
    for pool in result.pools:
        used, running = pool.used_share, pool.running
        figures = (f"{used.mean:.0%}", f"{used.max:.0%}", f"{running.mean:.1f}", f"{running.max:.0f}")
        table.add_row(pool.worker, *figures, str(pool.most_waiting))
    return table


def _throughput(throughput: Throughput) -> str:
    rates = f"{throughput.tokens_per_s:,.1f} tokens/s, {throughput.requests_per_s:.3g} requests/s"
    return f"{rates} over {throughput.seconds:.2f} s"


def _slo(slo: Slo) -> str:
    limits = []
    if slo.ttft_s is not None:
        limits.append(f"TTFT <= {slo.ttft_s * 1e3:g} ms")
    if slo.itl_s is not None:
        limits.append(f"its own ITL p{SLO_PERCENT:g} <= {slo.itl_s * 1e3:g} ms")
    return " and ".join(limits)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"
