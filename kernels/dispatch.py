"""Which of a kernel's forms a call gets: Triton's on a GPU; on a CPU that in C, where the process has loaded it and the
kernel has one; its torch twin elsewhere.

The device of a call's first tensor decides, unless `forced` says otherwise. Triton is imported by the first call that
needs it: a worker on a CPU never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from paceline.kernels import native
from paceline.kernels.native import ops as native_ops

P = ParamSpec("P")
R = TypeVar("R")


class Backend(Enum):
    """A form of the kernels. Every kernel has a twin and one for Triton; some have one in C."""

    TWIN = "twin"
    TRITON = "triton"
    NATIVE = "native"


_forced: ContextVar[Backend | None] = ContextVar("forced_backend", default=None)


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Calls inside get this form on any device. Triton on a CPU needs its interpreter: TRITON_INTERPRET=1 from the
    start of the process.
    """
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def backend_for(tensor: Tensor) -> Backend:
    """The form that a call on `tensor` gets."""
    on_cpu = Backend.NATIVE if native.is_loaded() else Backend.TWIN
    return _forced.get() or (Backend.TRITON if tensor.is_cuda else on_cpu)


def dispatched(twin: Callable[P, R], module: str) -> Callable[P, R]:
    """`twin`, or on a GPU the function of its name in `paceline.kernels.<module>`, which takes the same arguments."""
    compiled: list[Callable[P, R]] = []
    in_c: Callable[P, R] = getattr(native_ops, twin.__name__, twin)

    @wraps(twin)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        assert isinstance(tensor, Tensor)
        backend = backend_for(tensor)
        if backend is not Backend.TRITON:
            return in_c(*args, **kwargs) if backend is Backend.NATIVE else twin(*args, **kwargs)
        if not compiled:
            compiled.append(getattr(import_module(f"paceline.kernels.{module}"), twin.__name__))
        return compiled[0](*args, **kwargs)

    return call
