"""The search for the highest rate that keeps an SLO. Pure: it says which rate to try, and is told how it went."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class RateSearch:
    """Doubles from `first` while all is well, or halves while it is not; then bisects, by ratio.

    It assumes that what fails at a rate fails at any higher one. A probe near the limit is decided by chance, so the
    answer is no sharper than the probes are long.
    """

    first: float
    highest: float
    tolerance: float
    lowest: float = 1e-3
    passed: float | None = None  # the highest rate that went well
    failed: float | None = None  # the lowest that did not

    @property
    def next_rate(self) -> float | None:
        """The rate to try now; None when `passed` is the answer."""
        if self.passed is None and self.failed is None:
            return min(self.first, self.highest)
        if self.failed is None:
            assert self.passed is not None
            return min(2 * self.passed, self.highest) if self.passed < self.highest else None
        if self.passed is None:
            return self.failed / 2 if self.failed / 2 >= self.lowest else None
        if self.failed / self.passed <= 1 + self.tolerance:
            return None
        return math.sqrt(self.passed * self.failed)

    def told(self, rate: float, *, well: bool) -> Self:
        """The search after a probe at `rate`."""
        if well:
            return replace(self, passed=rate if self.passed is None else max(self.passed, rate))
        return replace(self, failed=rate if self.failed is None else min(self.failed, rate))
