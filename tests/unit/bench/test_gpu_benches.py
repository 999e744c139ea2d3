"""Benches that need GPUs, tried without: what they compute is interpreted, and what they compile is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[3] / "bench"


def _run(*command: str, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{BENCH}:{BENCH.parent / 'src'}"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=280
    )


def test_kv_that_is_stored_twice_is_the_same_in_both_pools(tmp_path: Path) -> None:
    done = _run(str(BENCH / "dual_write.py"), "--quick", "--json", str(tmp_path / "dual.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 blocks arrived wrong" in done.stdout and "verdict: " in done.stdout


def test_attention_over_strewn_blocks_is_that_of_float64() -> None:
    done = _run(str(BENCH / "full_pool.py"), "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 6 points are wrong" in done.stdout and "takes 27 blocks of 12" in done.stdout


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("ceilings.py", "the GPU cuda:0"),
        ("dual_write.py", "the GPUs cuda:0 and cuda:1"),
        ("full_pool.py", "the GPU cuda:0"),
        ("gpu_cluster.py rows", "the GPUs cuda:0 and cuda:1"),
        ("gpu_cluster.py colocated --devices cuda:3", "the GPU cuda:3"),
        ("gpu_engine.py", "the GPU cuda:0"),
        ("gpu_smollm.py", "the GPU cuda:0"),
        ("graph_check.py", "the GPU cuda:0"),
        ("part_ceilings.py", "the GPU cuda:0"),
        ("time_sampling.py", "the GPU cuda:0"),
        ("transfer.py", "the GPUs cuda:0 and cuda:1"),
        ("transfer_fan.py --devices cuda:0,cuda:1", "the GPUs cuda:0 and cuda:1"),
        ("tune_attention.py", "the GPU cuda:0"),
        ("tune_linear.py", "the GPU cuda:0"),
        ("tune_step.py", "the GPU cuda:0"),
    ],
)
def test_a_bench_without_its_gpus_says_so_in_one_line(
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    needed: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as caught:
        bench(command.partition(".py")[0]).main()
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"{command.split()[0]} needs {needed}: torch {torch.__version__} finds 0 here\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bench compiles it")
def test_storing_twice_compiles_for_an_h200() -> None:
    program = """
import torch
from paceline import kernels
from paceline.testing import compile_only
compile_only.pretend()
from dual_store import PeerPool, rope_and_store_twice
pool = torch.zeros(3, 8, 2, 2, 16, 128, dtype=torch.bfloat16)
rows = kernels.store_rows(torch.arange(32), pool)
cos, sin = kernels.rope_tables(128, 32, 1e4)
qkv = torch.zeros(32, 48, 128, dtype=torch.bfloat16)
with kernels.forced(kernels.Backend.TRITON):
    rope_and_store_twice(qkv, cos, sin, rows, pool, 1, PeerPool.of(1 << 40, [1, 2], 32, pool))
"""
    done = _run("-c", program, interpret=False)
    assert done.returncode == 0, done.stderr
