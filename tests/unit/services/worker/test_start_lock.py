from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.services.worker.start_lock import StartLock


def test_the_epoch_grows_with_each_life(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        lock = StartLock.acquire(tmp_path, "decode-0")
        epochs.append(lock.epoch)
        lock.release()
    assert epochs == sorted(set(epochs))


def test_the_epoch_grows_even_if_the_clock_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = StartLock.acquire(tmp_path, "decode-0")
    first.release()
    monkeypatch.setattr("time.time_ns", lambda: 1)
    second = StartLock.acquire(tmp_path, "decode-0")
    second.release()
    assert second.epoch > first.epoch


def test_a_full_disk_is_told_by_the_folders_name_and_costs_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StartLock.acquire(tmp_path, "decode-0")
    first.release()

    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        with pytest.raises(ConfigError, match=f"run_dir {tmp_path} cannot be used: .*lock: No space left on device"):
            StartLock.acquire(tmp_path, "decode-0")
    monkeypatch.setattr("time.time_ns", lambda: 1)
    second = StartLock.acquire(tmp_path, "decode-0", wait_s=0.1)
    second.release()
    assert second.epoch > first.epoch


def test_an_epoch_that_is_written_in_part_is_a_full_disk_and_costs_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StartLock.acquire(tmp_path, "decode-0")
    first.release()
    write = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", lambda descriptor, data, offset: write(descriptor, data[:3], offset))
        with pytest.raises(ConfigError, match="No space left on device"):
            StartLock.acquire(tmp_path, "decode-0")
    monkeypatch.setattr("time.time_ns", lambda: 1)
    second = StartLock.acquire(tmp_path, "decode-0", wait_s=0.1)
    second.release()
    assert second.epoch > first.epoch


def test_a_second_life_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    lock = StartLock.acquire(tmp_path, "decode-0")
    with pytest.raises(ConfigError, match="'decode-0' is in use"):
        StartLock.acquire(tmp_path, "decode-0", wait_s=0.1)
    other = StartLock.acquire(tmp_path, "decode-1", wait_s=0.1)
    other.release()
    lock.release()


@pytest.mark.parametrize("worker_id", ["", "..", ".", "a/b", "a" * 200, "a\0b", "\n"])
def test_an_id_that_is_no_plain_name_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(ConfigError, match="worker_id"):
        StartLock.acquire(tmp_path, worker_id)


def test_the_lock_is_held_until_the_last_process_that_inherited_it_is_dead(tmp_path: Path) -> None:
    lock = StartLock.acquire(tmp_path, "decode-0")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(lock.file_descriptor,))
    try:
        lock.release()
        with pytest.raises(ConfigError):
            StartLock.acquire(tmp_path, "decode-0", wait_s=0.2)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    StartLock.acquire(tmp_path, "decode-0", wait_s=5).release()


def test_garbage_in_the_lock_file_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "decode-0").mkdir()
    (tmp_path / "decode-0" / "lock").write_bytes(b"\xff\xfe garbage" * 20)
    lock = StartLock.acquire(tmp_path, "decode-0")
    assert (tmp_path / "decode-0" / "lock").read_text() == str(lock.epoch)
    lock.release()
