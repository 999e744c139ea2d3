"""Compiles the C kernels for this processor, keeps the result, and loads it.

The file's name holds a digest of source, compiler, flags and processor, so that a cache that is shared by machines, or
outlives an update, never gives a wrong one. What is loaded is code, so a file or a folder that another user could write
to is never used: then, and where the folder cannot be written to, the kernels are compiled for this process alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.bound_process import bound_process

_SOURCE: Final = Path(__file__).with_name("kernels.c")
_FLAGS: Final = (
    *("-O3", "-march=native", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
)
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)  # other processors' compilers refuse it
_COMPILE_S: Final = 60.0
_SCRATCH: Final = ".compiling-"
_LEFT_AFTER_S: Final = 10 * _COMPILE_S
"""A scratch folder that is older was left by a process that was killed."""
_SEAL_BYTES: Final = 32
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

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
    """The kernels are in use."""

    path: Path
    not_kept: str | None = None  # why `path` was made for this process alone, and is gone


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
        found, loaded = _from(folder, compiler)
    except subprocess.CalledProcessError as error:
        return Missing(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:200]}")
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return Missing(str(error)[:200])
    _loaded[:] = [found]
    return loaded


def _from(folder: Path, compiler: str) -> tuple[ctypes.CDLL, Loaded]:
    flags = flags_for(platform.machine())
    path = folder / f"cpu-{_digest(compiler, flags)}.so"
    try:
        _make_own(folder)
        _sweep(folder)
        with contextlib.suppress(OSError, AttributeError):  # absent, damaged, or another user's: it is made anew
            return _opened(path), Loaded(path)
        _compile(compiler, flags, path)
        return _opened(path), Loaded(path)
    except OSError as error:
        not_kept = str(error)
    with tempfile.TemporaryDirectory(prefix="paceline-") as own:
        path = Path(own) / path.name
        _compile(compiler, flags, path)
        return _opened(path), Loaded(path, not_kept)


def flags_for(machine: str) -> tuple[str, ...]:
    """The compiler's flags on a machine as `uname -m` calls it."""
    return _FLAGS + (_X86_FLAGS if machine in ("x86_64", "i686") else ())


def _opened(path: Path) -> ctypes.CDLL:
    _check_own(path)
    _check_whole(path)
    # OpenMP's functions are not linked: they are those of the runtime that torch has loaded for everybody.
    found = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _make_own(folder: Path) -> None:
    """Makes the folder, and takes from others the right to write to it. OSError where it is another user's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    _check_own(folder)


def _check_own(path: Path) -> None:
    """Raises OSError where someone besides this user and root could have written it, or where it is not there."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"others could write to {path}: it is user {status.st_uid}'s, with mode {mode:04o}")


def _check_whole(path: Path) -> None:
    """Raises OSError for what `_compile` did not leave so: loading a file that was cut off would end the process."""
    if not path.is_file():  # reading a pipe would wait
        raise OSError(f"{path} is no file")
    contents = path.read_bytes()
    if hashlib.sha256(contents[:-_SEAL_BYTES]).digest() != contents[-_SEAL_BYTES:]:
        raise OSError(f"{path} is damaged")


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent) as scratch:
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        _run(scratch, compiler, *flags, "-c", str(_SOURCE), "-o", str(compiled))
        _run(scratch, compiler, "-shared", str(compiled), "-o", str(linked), "-lm")
        # A seal behind the code, which the loader does not look at.
        with linked.open("r+b") as file:
            seal = hashlib.sha256(file.read()).digest()
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
        linked.chmod(0o600)  # whatever the umask says
        linked.replace(path)  # another process may do the same at this moment: either file is right


def _run(scratch: str, *command: str) -> None:
    # The compiler's own files go to the scratch folder too: whoever is killed in the middle removes nothing.
    env = {**os.environ, "TMPDIR": scratch}
    with bound_process(command, output=subprocess.DEVNULL, errors=subprocess.PIPE, env=env) as process:
        _, said = process.communicate(timeout=_COMPILE_S)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _sweep(folder: Path) -> None:
    """Removes what processes left there that were killed while they compiled."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # it ends by itself just now
            if time.time() - scratch.stat().st_mtime > _LEFT_AFTER_S:
                shutil.rmtree(scratch)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    found = hashlib.blake2b(digest_size=12)
    status = Path(compiler).resolve().stat()
    for part in (_SOURCE.read_text(), " ".join(flags), f"{compiler} {status.st_size} {status.st_mtime_ns}"):
        found.update(part.encode())
    found.update(_processor().encode())
    return found.hexdigest()


def _processor() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []  # noqa: PTH110
    wanted = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
