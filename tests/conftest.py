"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.checkpoint import Source, resolve
from paceline.config import default_cache_dir

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children would inherit it: Ctrl-C could not be tried on them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model() -> Source:
    """The default model in the user's cache, fetched on first use. For tests marked `model`."""
    return resolve("smollm2-135m-instruct", cache_dir=default_cache_dir(os.environ))


@pytest.fixture(scope="session")
def gemma3() -> Source:
    """Gemma 3 270M in the user's cache, fetched on first use. For tests marked `model`."""
    return resolve("gemma3-270m", cache_dir=default_cache_dir(os.environ))
