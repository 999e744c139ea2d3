"""Kernels in C for decode steps on a CPU, compiled on the machine that runs them, at its first start.

`load` is called once, by a process that wants them. Where there is no C compiler, or it cannot make them, the torch
twins compute instead: slower, and the same numbers but for rounding.
"""

from paceline.kernels.native.library import Loaded, Missing, is_loaded, load

__all__ = ["Loaded", "Missing", "is_loaded", "load"]
