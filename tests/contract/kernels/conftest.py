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

from paceline.kernels import Backend, forced, native, overlapping

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> native.Loaded | native.Missing:
    """The kernels in C, compiled once. From then on CPU calls get them that nothing else is `forced` on."""
    return native.load(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=list(Backend), ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Backend]:
    """Every form that the device has, each the one that the test's calls get."""
    if request.param is Backend.NATIVE:
        if device.type != "cpu":
            pytest.skip("kernels in C compute on a CPU")
        if isinstance(missing := request.getfixturevalue("in_c"), native.Missing):
            pytest.skip(missing.why)
    with forced(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def overlap() -> Iterator[None]:
    """As in steps that are chains of our kernels: elsewhere they compute the same with less in their way."""
    with overlapping(True):
        yield


@pytest.fixture
def triton_backend() -> Iterator[None]:
    with forced(Backend.TRITON):
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
