"""What a scaling benchmark measured: kept as JSON over several runs, and shown as a table in Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One shape under one load. Rates are a second."""

    shape: str
    workers: int
    devices: int
    per_device: int
    device: str  # what kind: cpu or cuda
    model: str
    input_tokens: int
    output_tokens: int
    commit: str | None
    concurrency: int  # of the closed loop
    tokens_per_s: float  # answers' tokens in its steady state
    requests_per_s: float
    failed: int
    goodput: dict[str, float | None]  # requests a second, by the limit on the first token in ms; None: no rate was well
    slo_itl_ms: float
    warnings: list[str]

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same replaces."""
        return (self.model, self.device, self.per_device, self.shape, self.input_tokens, self.output_tokens)

    @property
    def load(self) -> tuple[int, int]:
        """Tokens of prompt and answer."""
        return self.input_tokens, self.output_tokens


def load_cells(path: Path) -> list[Cell]:
    """What earlier runs left."""
    return msgspec.json.decode(path.read_bytes(), type=list[Cell]) if path.exists() else []


def keep(path: Path, cells: Sequence[Cell], new: Cell) -> list[Cell]:
    """The cells with `new` among them, in place of an earlier one of its kind; also in the file."""
    kept = [*(cell for cell in cells if cell.key != new.key), new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return kept


def markdown(cells: Sequence[Cell]) -> str:
    """A table for each load, shapes in the order they came in."""
    parts = []
    for load in dict.fromkeys(cell.load for cell in cells):
        chosen = [cell for cell in cells if cell.load == load]
        limits = list(dict.fromkeys(limit for cell in chosen for limit in cell.goodput))
        head = ["shape", "devices", "tokens/s", "tokens/s a device", "requests/s"]
        head += [f"goodput, TTFT <= {limit} ms" for limit in limits]
        lines = [
            f"{load[0]:,} tokens in, {load[1]:,} out; goodput: requests/s with ITL p99 <= {chosen[0].slo_itl_ms:g} ms",
            "",
        ]
        lines += [_row(head), _row(["---"] * len(head))]
        lines += [_row(_figures(cell, limits)) for cell in chosen]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _figures(cell: Cell, limits: Sequence[str]) -> list[str]:
    shape = f"{cell.shape}, {cell.per_device} a device" if cell.per_device > 1 else cell.shape
    devices = max(1, cell.devices)
    rates = [f"{cell.tokens_per_s:,.0f}", f"{cell.tokens_per_s / devices:,.0f}", f"{cell.requests_per_s:.3g}"]
    return [shape, str(cell.devices), *rates, *(_rate(cell.goodput.get(limit)) for limit in limits)]


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.3g}"


def _row(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Throughput above, goodput below, a column a load. Needs matplotlib."""
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(cell.load for cell in cells))
    figure = Figure(figsize=(5 * len(loads), 7), layout="constrained")
    axes: Any = figure.subplots(2, len(loads), squeeze=False)
    for column, load in enumerate(loads):
        chosen = [cell for cell in cells if cell.load == load]
        names = [f"{cell.shape}\nx{cell.per_device}" if cell.per_device > 1 else cell.shape for cell in chosen]
        top, bottom = axes[0][column], axes[1][column]
        top.bar(range(len(chosen)), [cell.tokens_per_s for cell in chosen])
        top.set_xticks(range(len(chosen)), names)
        top.set(title=f"{load[0]:,} in, {load[1]:,} out", ylabel="tokens/s at saturation")
        limits = list(dict.fromkeys(limit for cell in chosen for limit in cell.goodput))
        width = 0.8 / max(1, len(limits))
        for place, limit in enumerate(limits):
            heights = [cell.goodput.get(limit) or 0.0 for cell in chosen]
            at = [index + width * (place - (len(limits) - 1) / 2) for index in range(len(chosen))]
            bottom.bar(at, heights, width, label=f"TTFT <= {limit} ms")
        bottom.set_xticks(range(len(chosen)), names)
        bottom.set(ylabel=f"goodput, requests/s (ITL p99 <= {chosen[0].slo_itl_ms:g} ms)")
        bottom.legend()
    figure.savefig(path, dpi=120)
