"""The start lock: one life of a worker id at a time on a host, and a new epoch for each.

The lock is a flock on `RUN_DIR/WORKER_ID/lock`, whose open file is shared by the front and its engine process. The
kernel lets go of it when the last of the two is dead, `kill -9` included. So a life that holds the lock *proves* that
the earlier ones can write to nobody's memory any more, which is what frees the blocks quarantined on their account.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path

from paceline.errors import ConfigError, quote

_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POLL_S = 0.05


class StartLock:
    """A held lock. `epoch` is larger than that of every earlier holder."""

    def __init__(self, file_descriptor: int, epoch: int, directory: Path) -> None:
        self.file_descriptor = file_descriptor
        self.epoch = epoch
        self.directory = directory
        """Private to the worker id while the lock is held."""

    @property
    def identity(self) -> str:
        """Names this very lock: two lives that held the same one cannot have been alive together.

        The same worker id under another run folder, in another container or on another host is another lock, and then a
        later epoch proves nothing about an earlier one.
        """
        status = os.fstat(self.file_descriptor)
        return f"{_boot_id()}/{status.st_dev}/{status.st_ino}"

    @classmethod
    def acquire(cls, run_dir: Path, worker_id: str, *, wait_s: float = 10.0) -> StartLock:
        """Takes the lock, waiting for an earlier life to finish dying; ConfigError when it is alive still, or
        when the folder cannot be written to.
        """
        if not _WORKER_ID.fullmatch(worker_id):
            raise ConfigError(
                f"worker_id {quote(worker_id)} is not made of 1 to 128 letters, digits, dots, dashes and underscores"
            )
        directory = run_dir / worker_id
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"run_dir {run_dir} cannot be used: {error.strerror}") from error
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"worker_id {worker_id!r} is in use: another process has held {directory / 'lock'} for {wait_s:g} s"
                )
            time.sleep(_POLL_S)
        try:
            return cls(descriptor, _next_epoch(descriptor), directory)
        except OSError as error:  # a full disk, say
            os.close(descriptor)
            raise ConfigError(f"run_dir {run_dir} cannot be used: {directory / 'lock'}: {error.strerror}") from error

    def release(self) -> None:
        """Closes this process's copy; the lock is free when the engine process's copy is closed as well."""
        os.close(self.file_descriptor)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _next_epoch(descriptor: int) -> int:
    # Wall-clock nanoseconds order the lives; the file does where the clock stepped back.
    text = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
    epoch = max(time.time_ns(), int(text) + 1 if text.isdecimal() else 0)
    digits = str(epoch).encode()
    if os.pwrite(descriptor, digits, 0) < len(digits):  # what is left of the earlier one makes it no smaller than that
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, len(digits))  # afterwards: a disk that is full must not cost the epoch that was there
    return epoch
