"""The CUDA driver's calls, each return code checked in one place."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from typing import Any


class DriverError(RuntimeError):
    """A call that the driver refused; the message names the call and the driver's own name for the error."""


def unavailable() -> str | None:
    """None where the driver can be called, else the reason why not."""
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return f"cuda-bindings cannot be imported: {error}"
    try:
        call("cuInit", 0)
    except DriverError as error:
        return str(error)
    return None


def call(name: str, *arguments: Any) -> Any:
    """Calls the driver's function `name`. Returns its one result, a tuple of several, or None; raises `DriverError`."""
    driver = importlib.import_module("cuda.bindings.driver")
    try:
        code, *results = getattr(driver, name)(*arguments)
    except (RuntimeError, AttributeError) as error:  # no driver, or one without this call
        raise DriverError(f"{name} cannot be called: {error}") from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name} failed: {getattr(code, 'name', code)}")
    return (results[0] if results else None) if len(results) < 2 else tuple(results)


def constant(enumeration: str, name: str) -> Any:
    """A value of one of the driver's enumerations."""
    return getattr(getattr(importlib.import_module("cuda.bindings.driver"), enumeration), name)


@contextlib.contextmanager
def current(context: Any) -> Iterator[None]:
    """Makes `context` this thread's current one meanwhile."""
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def struct_from(name: str, contents: bytes) -> Any:
    """One of the driver's plain structs that holds these bytes, all of it."""
    made = getattr(importlib.import_module("cuda.bindings.driver"), name)()
    ctypes.memmove(made.getPtr(), contents, len(contents))
    return made


def bytes_of(struct: Any, num_bytes: int) -> bytes:
    """A plain struct's bytes."""
    return ctypes.string_at(struct.getPtr(), num_bytes)
