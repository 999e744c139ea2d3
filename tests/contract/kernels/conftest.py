"""Every kernel, Triton's form and its twin, against float64.

On a GPU the kernels are compiled and pytest collects these files as they are. Elsewhere Triton interprets them, which
it decides when it is imported, so they are collected only with TRITON_INTERPRET=1; `tests/contract/test_kernels.py`
runs them so, in a process of their own. KERNEL_COVER=all tries all combinations of shapes instead of all pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from paceline.kernels import Backend, forced

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(params=list(Backend), ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Both forms, each the one that the test's calls get."""
    with forced(request.param):
        yield request.param


@pytest.fixture
def triton_backend() -> Iterator[None]:
    with forced(Backend.TRITON):
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
