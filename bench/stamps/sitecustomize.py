"""Notes when requests pass points of their path, in every process that is started with this folder on its path.

Production code knows nothing of it: functions are wrapped as their modules are imported. A line of $REQUEST_STAMPS is a
point's name and the monotonic clock, which the processes of a host share, in nanoseconds.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

_FILE: Final = os.environ.get("REQUEST_STAMPS")
_ANY: Final = ""

# module: (what, at its "entry" or "exit", the point, and the kind of struct or of event that must be in an argument)
POINTS: Final[dict[str, tuple[tuple[str, str, str, str], ...]]] = {
    "paceline.services.router.face": (
        ("RouterFace.Generate", "entry", "router: entered", _ANY),
        ("piece_to_proto", "exit", "router: writes", _ANY),
    ),
    "paceline.services.router.prompt": (("PromptReader.read", "exit", "router: read", _ANY),),
    "paceline.services.router.fleet": (("Fleet.place", "exit", "router: placed", _ANY),),
    "paceline.services.router.calls": (
        ("WorkerClient.prefill", "exit", "router: calls prefill", _ANY),
        ("WorkerClient.generate", "exit", "router: calls decode", _ANY),
        ("PrefillCall.reply", "exit", "router: has the reply", _ANY),
    ),
    "paceline.services.router.leg": (("Leg._on_reserved", "entry", "router: reserved", _ANY),),
    "paceline.services.prefill.front": (
        ("PrefillFront.Prefill", "entry", "prefill: entered", _ANY),
        ("PrefillFront.Prefill", "exit", "prefill: replies", _ANY),
        ("PrefillFront.reported", "entry", "prefill: heard", "Prefilled"),
    ),
    "paceline.services.decode.front": (
        ("DecodeFront.Generate", "entry", "decode: entered", _ANY),
        ("DecodeFront.reported", "entry", "decode: heard reserved", "Reserved"),
    ),
    "paceline.services.worker.front": (
        ("WorkerFront.send", "exit", "prefill: sent", "StartPrefill"),
        ("WorkerFront.send", "exit", "decode: sent", "Reserve"),
    ),
    "paceline.services.worker.link": (
        ("EngineLink.receive_all", "exit", "prefill engine: has it", "StartPrefill"),
        ("EngineLink.receive_all", "exit", "decode engine: has it", "Reserve"),
        ("EngineLink.send", "exit", "prefill engine: told", "Prefilled"),
        ("EngineLink.send", "exit", "decode engine: told reserved", "Reserved"),
    ),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of POINTS as they would be, and wraps their functions once they are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        points = POINTS.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if points else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for point in points or ():
                _wrap(module, *point)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, what: str, when: str, point: str, kind: str) -> None:
    holder: Any = module
    *outer, name = what.split(".")
    for part in outer:
        holder = getattr(holder, part)
    function = getattr(holder, name, None)
    if function is None:
        return  # a later or an earlier version has no such point

    def note(values: tuple[Any, ...]) -> None:
        if kind == _ANY or any(_has(value, kind) for value in values):
            _stamp(point)

    setattr(holder, name, _noting(function, when, note))


def _noting(function: Any, when: str, note: Callable[[tuple[Any, ...]], None]) -> Any:
    if when == "exit" and inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def noted(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            note((*args, result))
            return result

        return noted

    def plain(*args: Any, **kwargs: Any) -> Any:
        if when == "entry":
            note(args)
        result = function(*args, **kwargs)
        if when == "exit":
            note((*args, result))
        return result

    if inspect.iscoroutinefunction(function):
        # gRPC looks whether a handler is a coroutine function.
        @functools.wraps(function)
        async def entered(*args: Any, **kwargs: Any) -> Any:
            note(args)
            return await function(*args, **kwargs)

        return entered
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def streamed(*args: Any, **kwargs: Any) -> Any:
            note(args)
            async for each in function(*args, **kwargs):
                yield each

        return streamed
    return functools.wraps(function)(plain)


def _has(value: Any, kind: str) -> bool:
    """True for a struct of that name, a report with such an event, and a list with such a command."""
    if type(value).__name__ == kind:
        return True
    return any(
        type(each).__name__ == kind for each in (value if isinstance(value, list) else getattr(value, "events", ()))
    )


def _stamp(point: str) -> None:
    os.write(_descriptor, f"{point}\t{time.monotonic_ns()}\n".encode())


if _FILE:
    _descriptor: Final = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.meta_path.insert(0, _Finder())
