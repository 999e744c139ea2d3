"""What sampling costs on a GPU, by rows and by what they ask for, beside an argmax; its draws checked against the twin.

    python bench/time_sampling.py --json sampling.json
    TRITON_INTERPRET=1 python bench/time_sampling.py --quick      # no GPU: tries the logic, tells nothing of speed

At the end the rows of `docs/performance.md`: float32, which a step's logits are, by the batches that were timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_timing import seconds
from gpus import require
from paceline import kernels
from paceline.kernels import reference

Limits = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One point. Microseconds."""

    rows: int
    dtype: str
    kind: str
    us: float
    argmax_us: float
    differing: int  # draws that are not the twin's

    @property
    def text(self) -> str:
        """A line of the table."""
        return (
            f"{self.rows:4} rows {self.dtype:8} {self.kind:20} {self.us:8.1f} us  (argmax {self.argmax_us:6.1f})  "
            f"differing from the twin: {self.differing}"
        )


def model_logits(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Like a language model's: probabilities fall by a power of the rank, from even to sharp over the rows."""
    steepness = torch.linspace(1.2, 4.0, rows, device=device)[:, None]
    rank = torch.stack([torch.randperm(vocab, device=device) for _ in range(rows)]) + 1
    return 22.0 - steepness * rank.log() + 0.3 * torch.randn(rows, vocab, device=device)


def _kinds(rows: int, device: torch.device) -> Mapping[str, tuple[float, Limits]]:
    top_k = torch.full((rows,), 50, device=device)
    top_p = torch.full((rows,), 0.95, dtype=torch.float64, device=device)
    none_k, none_p = torch.zeros_like(top_k), torch.ones_like(top_p)
    return {
        "greedy": (0.0, (None, None)),
        "greedy, columns": (0.0, (none_k, none_p)),
        "plain": (1.0, (None, None)),
        "plain, columns": (1.0, (none_k, none_p)),
        "top-k 50": (1.0, (top_k, None)),
        "top-p 0.95": (1.0, (None, top_p)),
        "top-p 0.95, T 0.7": (0.7, (None, top_p)),
        "top-k 50, top-p 0.95": (1.0, (top_k, top_p)),
    }


def run(rows: int, vocab: int, device: torch.device, *, most: int) -> list[Row]:
    """All points of a number of rows; `most` rows of each are drawn by the twin too."""
    found: list[Row] = []
    number = torch.arange(rows, device=device)
    keys = kernels.sampling_keys(number, number * 0, number + 100)
    shaped = model_logits(rows, vocab, device)
    for dtype in (torch.float32, torch.bfloat16):
        logits = shaped.to(dtype)
        flat = torch.randn(rows, vocab, device=device).to(dtype)
        argmax = seconds(partial(torch.argmax, logits, -1), device)
        for kind, (heat, limits) in _kinds(rows, device).items():
            for name, values in ((kind, logits), (f"{kind}, flat", flat)):
                if name.endswith("flat") and "top-p 0.95" not in kind:
                    continue
                column = torch.full((rows,), heat, dtype=torch.float64, device=device)
                took = seconds(partial(kernels.sample_rows, values, column, *limits, keys), device)
                drawn, bad = kernels.sample_rows(values, column, *limits, keys)
                few_k, few_p = (None if limit is None else limit[:most] for limit in limits)
                wanted, _ = reference.sample_rows(values[:most], column[:most], few_k, few_p, keys[:most])
                differing = int((wanted != drawn[:most]).sum()) + int(bad.sum())
                found.append(Row(rows, str(dtype)[6:], name, 1e6 * took, 1e6 * argmax, differing))
                print(found[-1].text, flush=True)
    return found


def table(found: Sequence[Row]) -> str:
    """The rows of `docs/performance.md`: what each kind takes at each batch, beside an argmax."""
    of_steps = [row for row in found if row.dtype == "float32"]
    batches = sorted({row.rows for row in of_steps})
    lines = {
        kind: [row for row in of_steps if row.kind == kind] for kind in dict.fromkeys(row.kind for row in of_steps)
    }
    head = f"| sampling, batch {' / '.join(map(str, batches))} | us | of an argmax |\n|---|---|---|"
    return "\n".join(
        [
            head,
            *(
                f"| {kind} | {' / '.join(f'{row.us:.1f}' for row in rows)} "
                f"| {' / '.join(f'{row.us / row.argmax_us:.2f}' for row in rows)} |"
                for kind, rows in lines.items()
            ),
        ]
    )


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 16, 64, 128))
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, interpreted: tries the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require("cpu" if args.quick else args.device)
    if args.quick:
        args.device, args.rows, args.vocab = "cpu", (1, 3), 700
    torch.manual_seed(0)
    device = torch.device(args.device)
    backend = kernels.Backend.TRITON
    with kernels.forced(backend):
        found = [row for rows in args.rows for row in run(rows, args.vocab, device, most=128)]
    print(table(found))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    wrong = sum(row.differing for row in found)
    print(f"{wrong} draws of {sum(min(128, row.rows) for row in found)} differ from the twin's")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
