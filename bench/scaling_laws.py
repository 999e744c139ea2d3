"""What cells say together: what one worker more brings, and whether the router's estimate knew the best shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.client import Balance
from scaling_cells import Cell, Tier
from shapes import Shape

LEAST_GAIN = 0.95
"""Of what one worker does, that each worker more adds, until another tier is saturated."""


@dataclass(frozen=True)
class Gain:
    """What one more worker of a tier brought, as a share of what each before it did."""

    tier: str
    before: Cell
    after: Cell
    share: float
    unfit: str | None  # why it says nothing of the tier; None: it does

    @property
    def name(self) -> str:
        """As the table calls it."""
        load = f"{self.after.input_tokens}x{self.after.output_tokens}"
        return f"{load}: {self.tier}, {self.before.shape} to {self.after.shape}"


@dataclass(frozen=True)
class Ratio:
    """Of the shapes with so many workers: the one that served a load best, and the one that was to be expected."""

    load: tuple[int, int]
    workers: int
    best: str
    measured: dict[str, float]  # requests a second at saturation, by shape
    expected: str | None  # None: the router had no estimate
    told_by: str | None  # the shape whose router said so

    @property
    def foretold(self) -> bool | None:
        """Whether the estimate was right."""
        return None if self.expected is None else self.expected == self.best


def gains(cells: Sequence[Cell]) -> Iterator[Gain]:
    """Of every two cells that differ by one worker of a tier."""
    for before, after in itertools.permutations(cells, 2):
        if before.group != after.group or not before.prefill or not after.prefill:
            continue
        for name, tier, grown, other in (
            ("prefill", before.prefill, after.prefill, (before.decode, after.decode)),
            ("decode", before.decode, after.decode, (before.prefill, after.prefill)),
        ):
            if grown.workers == tier.workers + 1 and other[0].workers == other[1].workers:
                yield Gain(name, before, after, _share(tier, grown), _unfit(name, before, after))


def _share(before: Tier, after: Tier) -> float:
    if not before.tokens_per_s:
        return float("nan")  # which keeps no limit
    return (after.tokens_per_s - before.tokens_per_s) / (before.tokens_per_s / before.workers)


def _unfit(tier: str, before: Cell, after: Cell) -> str | None:
    shared = after.device != "cuda" or after.per_device > 1
    if shared and not after.parts:
        return "workers share a device"
    for cell in (before, after):
        own, other = cell.prefill_saturated, cell.decode_saturated
        if tier == "decode":
            own, other = other, own
        if other:
            return f"the other tier is saturated in {cell.shape}"
        if not own:
            return f"it is not saturated in {cell.shape}"
    return "workers share a device's memory and power" if shared else None


def best_split(balance: Balance, workers: int) -> Shape:
    """So many workers, divided over the tiers as the estimate has it."""
    prompts_per_s = balance.prefill_tokens_per_s / balance.prompt_tokens
    answers_per_s = balance.decode_tokens_per_s / balance.generated_tokens
    shapes = [Shape(prefill, workers - prefill) for prefill in range(1, workers)]
    return max(shapes, key=lambda shape: min(shape.prefill * prompts_per_s, shape.decode * answers_per_s))


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """For each load and number of workers of which several shapes with both tiers were measured.

    What the smallest shape's router said is what an operator would have known before adding workers.
    """
    found = []
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell.prefill:
            groups.setdefault(cell.group, []).append(cell)
    for group in groups.values():
        teller = min((cell for cell in group if cell.balance), key=lambda cell: cell.workers, default=None)
        for workers in sorted({cell.workers for cell in group}):
            measured = {cell.shape: cell.requests_per_s for cell in group if cell.workers == workers}
            if len(measured) < 2:
                continue
            balance = teller.balance if teller else None
            expected = str(best_split(balance, workers)) if balance else None
            told_by = teller.shape if teller else None
            best = max(measured, key=measured.__getitem__)
            found.append(Ratio(group[0].load, workers, best, measured, expected, told_by))
    return found
