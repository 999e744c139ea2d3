"""Compiles the C kernels for this processor, keeps the result, and loads it.

The file's name holds a digest of source, compiler, flags and processor, so that a cache that is shared by machines, or
outlives an update, never gives a wrong one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("kernels.c")
_FLAGS: Final = (
    *("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
)
_COMPILE_S: Final = 60.0

_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: Final = {
    "skinny_linear": (*[_POINTER] * 4, *[_INTEGER] * 4),
    "quantised_linear": (*[_POINTER] * 4, *[_INTEGER] * 4),
    "add_rms_norm": (*[_POINTER] * 4, *[_INTEGER] * 2, _REAL, _INTEGER),
    "swiglu": (*[_POINTER] * 2, *[_INTEGER] * 3),
    "rope_and_store": (*[_POINTER] * 5, *[_INTEGER] * 6),
    "decode_attention": (*[_POINTER] * 6, *[_INTEGER] * 9, _REAL, _INTEGER),
}

_loaded: Final[list[ctypes.CDLL]] = []  # one, once there is one: a process has it as it has torch


@dataclass(frozen=True, slots=True)
class Loaded:
    """The kernels are in use, from `path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class Missing:
    """The twins are in use, since `why`."""

    why: str


def is_loaded() -> bool:
    """True where this process has them."""
    return bool(_loaded)


def library() -> ctypes.CDLL:
    """The loaded functions, with their signatures."""
    assert _loaded, "asked only where `is_loaded`"
    return _loaded[-1]


def load(folder: Path) -> Loaded | Missing:
    """Makes the kernels usable in this process, compiled into `folder` unless they lie there."""
    compiler = shutil.which("cc")
    if compiler is None:
        return Missing("there is no C compiler called cc")
    try:
        path = _compiled(compiler, folder)
        # OpenMP's functions are not linked: they are those of the runtime that torch has loaded for everybody.
        found = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    except subprocess.CalledProcessError as error:
        return Missing(f"{compiler} failed: {str(error.stderr).strip()[:200]}")
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return Missing(str(error)[:200])
    _loaded[:] = [found]
    return Loaded(path)


def _compiled(compiler: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cpu-{_digest(compiler)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), "-o", str(linked), "-lm")
            linked.replace(path)  # another process may do the same at this moment: either file is right
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)


def _digest(compiler: str) -> str:
    found = hashlib.blake2b(digest_size=12)
    status = Path(compiler).resolve().stat()
    for part in (_SOURCE.read_text(), " ".join(_FLAGS), f"{compiler} {status.st_size} {status.st_mtime_ns}"):
        found.update(part.encode())
    found.update(_processor().encode())
    return found.hexdigest()


def _processor() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []  # noqa: PTH110
    wanted = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
