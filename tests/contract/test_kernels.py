"""The kernels' contract where there is no GPU: `tests/contract/kernels`, interpreted, in a process of its own.

Triton decides when it is imported whether it compiles or interprets, so no other test may share the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).parent / "kernels"


@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="collected as they are, and compiled")
def test_every_kernel_meets_its_contract_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1140)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled by every test")
def test_every_kernel_compiles_for_an_h200() -> None:
    """The interpreter runs kernels as Python, and accepts what the compiler refuses."""
    command = [sys.executable, "-m", "paceline.testing.compile_only"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1140)
    assert done.returncode == 0, done.stderr[-8000:]


def test_serving_on_a_cpu_never_imports_triton() -> None:
    """It costs seconds and memory, and a machine without a GPU may lack it."""
    program = """
import sys
import torch
from paceline import kernels
import paceline.engine.engine, paceline.engine.runner
pool = torch.zeros(2, 1, 1, 2, 16, 64)
plan = kernels.plan_attention([0], [3], [[1]], pool)
kernels.attention(torch.zeros(3, 4, 64), pool, 0, plan)
kernels.add_rms_norm(torch.zeros(1, 8), torch.zeros(1, 8), torch.ones(8), 1e-5)
kernels.linear(torch.zeros(1, 8), torch.zeros(4, 8))
kernels.sample(torch.zeros(1, 8), torch.ones(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64))
sys.exit(any(name.split('.')[0] == 'triton' for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
