"""`paceline models`: models on this machine."""

from __future__ import annotations

import argparse
import os

from paceline.config import RouterConfig, load


def fetch(arguments: argparse.Namespace) -> int:
    """Fetches a model into the cache, with a progress bar, and prints where it lies."""
    from paceline.checkpoint.source import resolve  # it pulls in the readers of model files

    flags = {name: value for name, value in vars(arguments).items() if name in ("model", "cache_dir") and value}
    config = load(RouterConfig, file=None, env=os.environ, flags=flags)
    source = resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
    print(source.path if source.path is not None else f"{source.name} is built in")
    return 0
