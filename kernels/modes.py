"""What a process decides once, at its start, about how its kernels compute. Free of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Modes:
    batch_invariant: bool = False
    overlap: bool = False


_modes = _Modes()


def set_batch_invariant(on: bool) -> None:
    """From now on a row's sums are made in one order, whatever it is batched with, at the cost of speed.

    Products and attention then have one kernel each for decodes and prompts alike, so that a token's numbers are the
    same, to the bit, also when it is computed again as part of a prompt, in chunks of any size. Norms, activations and
    sampling are so anyway. It says nothing of the twins, whose products are a CPU library's.
    """
    _modes.batch_invariant = on


def batch_invariant() -> bool:
    """Whether a row's numbers are the same whatever it is batched with."""
    return _modes.batch_invariant


@contextmanager
def overlapping(on: bool) -> Iterator[None]:
    """Whether kernels launched or captured inside may start while the one before ends, on GPUs that can.

    For chains of this project's own kernels, each of which waits for the one before it and lets the next one start
    before that. What others' kernels do while such a chain begins beside them is not known:
    docs/decisions/overlapping-kernels.md.
    """
    before, _modes.overlap = _modes.overlap, on
    try:
        yield
    finally:
        _modes.overlap = before


def kernels_may_overlap() -> bool:
    """Whether they may: not unless `overlapping` says so."""
    return _modes.overlap
