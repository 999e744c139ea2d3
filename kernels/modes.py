"""What a process decides once, at its start, about how its kernels compute. Free of Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Modes:
    batch_invariant: bool = False
    overlap: bool = True


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


def let_kernels_overlap(on: bool) -> None:
    """Whether kernels launched or captured from now on may start while the one before ends, on GPUs that can.

    They do unless told otherwise: what they compute is the same.
    """
    _modes.overlap = on


def kernels_may_overlap() -> bool:
    """Whether they may."""
    return _modes.overlap
