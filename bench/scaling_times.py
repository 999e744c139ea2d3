"""How long a scaling benchmark may take: a guess, to plan with where machines are lent by the minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scaling_measure import Load, Means
from shapes import Shape

GPU_START_S, CPU_START_S = 40.0, 12.0
"""Until a cluster serves, and until it has stopped: 8B shapes on GPUs, the small model on a CPU."""
DRAIN_S = 8.0
"""After a closed loop's last sending, and before its first: generator processes start, places become empty."""
PROBE_S = 3.0
"""Likewise for a run of a search."""
GPU_PROMPT_TOKENS = 43_000
"""Prompt tokens a second of a worker with 8B shapes, by which searches begin."""


@dataclass(frozen=True)
class Times:
    """By what a benchmark is made of."""

    means: Means
    on_gpu: bool

    def cell(self, shape: Shape, load: Load) -> float:
        """Seconds of one shape under one load."""
        closed = self.means.seconds + DRAIN_S
        return closed + (self.means.probes * self._probe(shape, load) if load.searched else 0.0)

    def shape(self, shape: Shape, loads: Sequence[Load]) -> float:
        """Seconds of one shape under several."""
        start = GPU_START_S if self.on_gpu else CPU_START_S
        return start + sum(self.cell(shape, load) for load in loads)

    def fitting(self, shape: Shape, loads: Sequence[Load], seconds: float) -> list[Load]:
        """The first of the loads, as many as end in time; none where the start alone takes longer."""
        fitting = list(loads)
        while fitting and self.shape(shape, fitting) > seconds:
            fitting.pop()
        return fitting

    def _probe(self, shape: Shape, load: Load) -> float:
        rate = GPU_PROMPT_TOKENS * (shape.prefill or shape.decode) / load.input_tokens
        sending = self.means.least_requests / (rate / 2) if self.on_gpu else 0.0
        return PROBE_S + max(self.means.seconds, sending)
