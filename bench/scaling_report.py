"""The cells of a scaling benchmark as tables in Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scaling_cells import Cell, Found, Tier
from scaling_laws import gains, ratios


def markdown(cells: Sequence[Cell]) -> str:
    """For each load a table of throughput by tier and one of goodput; then what a worker more brought, and ratios."""
    parts = []
    for load in _loads(cells):
        chosen = [cell for cell in cells if cell.load == load]
        parts += [f"{load[0]:,} tokens in, {load[1]:,} out, at saturation", _throughput(chosen)]
        if any(cell.goodput for cell in chosen):
            parts += [f"Goodput, requests/s, with ITL p99 <= {chosen[0].slo_itl_ms:g} ms", _goodput(chosen)]
    if rows := _gains(cells):
        parts += ["One worker more adds, of what one did before", rows]
    if rows := _ratios(cells):
        parts += ["Requests/s at saturation by shape", rows]
    return "\n\n".join(parts) + "\n"


def _throughput(cells: Sequence[Cell]) -> str:
    head = ["shape", "devices", "requests/s", "tokens/s", "tokens/s a device", "ITL p99 ms"]
    head += ["prefill: tokens/s", "busy", "decode: tokens/s", "batch", "pool", "KV GB/s", "saturated"]
    rows = []
    for cell in cells:
        devices = max(1, cell.devices)
        whole = [f"{cell.requests_per_s:.3g}", f"{cell.tokens_per_s:,.0f}", f"{cell.tokens_per_s / devices:,.0f}"]
        whole.append("" if cell.itl_p99_ms is None else f"{cell.itl_p99_ms:.3g}")
        prefill = ["", ""] if cell.prefill is None else [_rate(cell.prefill), f"{cell.prefill.busy_share:.0%}"]
        decode = [_rate(cell.decode), f"{cell.decode.running:.3g}", f"{cell.decode.used_share:.0%}"]
        told = [f"{cell.kv_gb_per_s:.3g}", cell.saturated]
        rows.append([_name(cell), str(cell.devices), *whole, *prefill, *decode, *told])
    return _table(head, rows)


def _goodput(cells: Sequence[Cell]) -> str:
    limits = list(dict.fromkeys(limit for cell in cells for limit in cell.goodput))
    rows = [[_name(cell), *(_found(cell.goodput.get(limit)) for limit in limits)] for cell in cells]
    return _table(["shape", *(f"TTFT <= {limit} ms" for limit in limits)], rows)


def _gains(cells: Sequence[Cell]) -> str:
    rows = [[gain.name, f"{gain.share:.2f}", gain.unfit or ""] for gain in gains(cells)]
    return _table(["tier", "adds", "says nothing of the tier, since"], rows) if rows else ""


def _ratios(cells: Sequence[Cell]) -> str:
    rows = []
    for ratio in ratios(cells):
        measured = ", ".join(f"{shape} {rate:.3g}" for shape, rate in ratio.measured.items())
        estimate = "none" if ratio.expected is None else f"{ratio.expected}, by the router of {ratio.told_by}"
        rows.append([f"{ratio.load[0]:,} in, {ratio.load[1]:,} out", measured, ratio.best, estimate])
    return _table(["load", "measured", "best", "the estimate"], rows) if rows else ""


def _name(cell: Cell) -> str:
    seating = _seating(cell)
    return f"{cell.shape}, {seating}" if seating else cell.shape


def _seating(cell: Cell) -> str:
    """How a worker has its device, where not for itself."""
    if cell.parts:
        return f"1/{cell.parts} of a device"
    return f"{cell.per_device} a device" if cell.per_device > 1 else ""


def _rate(tier: Tier) -> str:
    return f"{tier.tokens_per_s:,.0f}"


def _found(found: Found | None) -> str:
    """The rate, and the one that failed where no more was tried between."""
    if found is None:
        return ""
    if found.passed is None:
        return "none" if found.failed is None else f"under {found.failed:.3g}"
    return f"{found.passed:.3g}" if found.failed is None else f"{found.passed:.3g} (not {found.failed:.3g})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _loads(cells: Sequence[Cell]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(cell.load for cell in cells))


def plot(cells: Sequence[Cell], path: Path) -> None:
    """A column for each load: throughput, goodput where it was searched, and each tier against its workers.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    loads = _loads(cells)
    rows = [_plot_throughput, *([_plot_goodput] if any(cell.goodput for cell in cells) else []), _plot_tiers]
    figure = Figure(figsize=(5 * len(loads), 3.5 * len(rows)), layout="constrained")
    axes: Any = figure.subplots(len(rows), len(loads), squeeze=False)
    for column, load in enumerate(loads):
        chosen = [cell for cell in cells if cell.load == load]
        for row, draw in enumerate(rows):
            draw(axes[row][column], chosen)
    seatings = {_seating(cell) for cell in cells}
    if len(seatings) == 1 and (seating := seatings.pop()):
        figure.suptitle(f"Workers: {seating}")
    figure.savefig(path, dpi=120)


def _labels(cells: Sequence[Cell]) -> list[str]:
    """What tells cells of one load apart: how their workers sit only where that differs."""
    alike = len({_seating(cell) for cell in cells}) == 1
    return [cell.shape if alike else _name(cell).replace(", ", "\n") for cell in cells]


def _plot_throughput(axes: Any, cells: Sequence[Cell]) -> None:
    axes.bar(range(len(cells)), [cell.tokens_per_s for cell in cells])
    axes.set_xticks(range(len(cells)), _labels(cells))
    axes.set(title=f"{cells[0].input_tokens:,} in, {cells[0].output_tokens:,} out", ylabel="tokens/s at saturation")


def _plot_goodput(axes: Any, cells: Sequence[Cell]) -> None:
    limits = list(dict.fromkeys(limit for cell in cells for limit in cell.goodput))
    if not limits:
        axes.set_axis_off()
        return
    width = 0.8 / len(limits)
    for place, limit in enumerate(limits):
        founds = [cell.goodput.get(limit) for cell in cells]
        at = [index + width * (place - (len(limits) - 1) / 2) for index in range(len(cells))]
        axes.bar(at, [found.passed or 0.0 if found else 0.0 for found in founds], width, label=f"TTFT <= {limit} ms")
    axes.set_xticks(range(len(cells)), _labels(cells))
    axes.set(ylabel=f"goodput, requests/s (ITL p99 <= {cells[0].slo_itl_ms:g} ms)")
    axes.legend()


def _plot_tiers(axes: Any, cells: Sequence[Cell]) -> None:
    """Throughput of each tier, as a multiple of one worker's; hollow where it was not saturated."""
    cells = [cell for cell in cells if cell.prefill]
    if not cells:
        axes.set_axis_off()
        return
    for tier, marker in (("prefill", "o"), ("decode", "s")):
        shown = [(cell, getattr(cell, tier)) for cell in cells]
        one = min(shown, key=lambda each: (each[1].workers, each[0].workers))[1]
        unit = one.tokens_per_s / one.workers or 1.0
        colour = axes.plot([], [], marker=marker, linestyle="none", label=f"{tier}, 1 = {unit:,.0f} tokens/s")[0]
        shift = -0.06 if tier == "prefill" else 0.06  # beside each other, where both are as many
        for label, (cell, of) in zip(_labels(cells), shown, strict=True):
            full = getattr(cell, f"{tier}_saturated")
            face = colour.get_color() if full else "none"
            at = (of.workers + shift, of.tokens_per_s / unit)
            axes.plot(*at, marker, color=colour.get_color(), markerfacecolor=face)
            side = {"xytext": (-6, 0), "ha": "right"} if tier == "prefill" else {"xytext": (6, 0), "ha": "left"}
            axes.annotate(label, at, textcoords="offset points", va="center", fontsize=7, **side)
    most = max(cell.workers for cell in cells)
    axes.plot([1, most], [1, most], linestyle=":", color="grey")
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.5, most + 0.5)
    axes.set(xlabel="workers of the tier", ylabel="throughput of the tier (filled: saturated)")
    axes.legend()
