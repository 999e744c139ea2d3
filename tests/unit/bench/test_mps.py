"""Parts of a GPU without one: what is done with the daemon, by a program that stands in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bench = Callable[[str], Any]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script on the PATH as the daemon's control."""

    def put(script: str) -> None:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_each_part_has_its_share_of_a_daemon_that_is_told_to_quit(
    bench: Bench, daemon: Callable[[str], None], tmp_path: Path
) -> None:
    said = tmp_path / "said"
    daemon(f'echo "$CUDA_MPS_PIPE_DIRECTORY" "$@" >> {said}; [ "$1" = -d ] || cat >> {said}')
    with bench("mps").Parts(6) as parts:
        folder = parts.env["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir()
        assert parts.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "16"
    assert said.read_text().splitlines() == [f"{folder} -d", folder, "quit"]
    assert not Path(folder).exists()


def test_a_daemon_that_waits_for_its_clients_hides_no_error(
    bench: Bench, daemon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon('[ "$1" = -d ] || exec sleep 60')
    mps = bench("mps")
    with pytest.raises(KeyError, match="what went wrong"), mps.Parts(2) as parts:
        monkeypatch.setattr(mps, "_STOP_S", 0.2)
        raise KeyError("what went wrong")
    assert not Path(parts.env["CUDA_MPS_LOG_DIRECTORY"]).exists()
