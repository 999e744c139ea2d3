"""What a scaling benchmark measured, a cell for each shape and load: kept as JSON over several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.client import Balance

SATURATED_SHARE = 0.9
"""Of its time, that a prefill worker computes when it is saturated."""
FULL_SHARE = 0.85
"""Of its pool or batch, that a decode worker uses when it is saturated; or of a closed loop's requests, that it has."""


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one tier together, in the closed loop's steady state."""

    workers: int
    tokens_per_s: float  # prompts' tokens whose first token came, or answers' tokens from the second on
    busy_share: float  # of its time, that a worker computed, on average
    running: float  # requests in a worker's hands, on average
    used_share: float  # of a worker's pool, on average


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Between which rates goodput ends: the highest that went well, the lowest that did not. None: none of the kind."""

    passed: float | None
    failed: float | None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One shape under one load. Rates are a second. Without prefill workers, decode workers compute the prompts too."""

    shape: str
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
    itl_p99_ms: float | None
    prefill: Tier | None
    decode: Tier
    batch_requests: int  # in a decode worker's step at most
    kv_gb_per_s: float  # moved into decode workers
    balance: Balance | None  # the router's estimate, when all was over
    failed: int  # requests, over all runs
    goodput: dict[str, Found]  # by the limit on the first token in ms; empty: not searched
    slo_itl_ms: float
    warnings: list[str]
    parts: int = 0  # of a device's multiprocessors, of which each worker had one; 0: they were common to all

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same replaces."""
        return (*self.group, self.shape)

    @property
    def group(self) -> tuple[object, ...]:
        """What cells have in common that may be compared."""
        return (self.model, self.device, self.per_device, self.parts, self.input_tokens, self.output_tokens)

    @property
    def load(self) -> tuple[int, int]:
        """Tokens of prompt and answer."""
        return self.input_tokens, self.output_tokens

    @property
    def workers(self) -> int:
        """Of both tiers."""
        return self.decode.workers + (self.prefill.workers if self.prefill else 0)

    @property
    def prefill_saturated(self) -> bool:
        """True where prefill workers computed nearly all of the time."""
        return self.prefill is not None and self.prefill.busy_share >= SATURATED_SHARE

    @property
    def decode_saturated(self) -> bool:
        """True where decode workers were full, by requests or by blocks, or had nearly all that were sent in hand."""
        decoding = self.decode.running * self.decode.workers
        return (
            self.decode.used_share >= FULL_SHARE
            or decoding >= FULL_SHARE * self.concurrency
            or (self.batch_requests > 0 and self.decode.running >= FULL_SHARE * self.batch_requests)
        )

    @property
    def saturated(self) -> str:
        """Which tier held the others up."""
        tiers = {"prefill": self.prefill_saturated, "decode": self.decode_saturated}
        return " and ".join(name for name, full in tiers.items() if full) or "neither"


def load_cells(path: Path) -> list[Cell]:
    """What earlier runs left."""
    return msgspec.json.decode(path.read_bytes(), type=list[Cell]) if path.exists() else []


def keep(path: Path, cells: Sequence[Cell], new: Cell) -> list[Cell]:
    """The cells with `new` among them, in place of an earlier one of its kind; also in the file."""
    kept = [*(cell for cell in cells if cell.key != new.key), new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return kept
