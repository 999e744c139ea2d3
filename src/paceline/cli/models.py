"""`paceline models`: models on this machine."""

from __future__ import annotations

import argparse
import os

from paceline.cli.output import byte_size
from paceline.config import RouterConfig, load


def fetch(arguments: argparse.Namespace) -> int:
    """Fetches a model into the cache, with a progress bar, and prints where it lies."""
    from paceline.checkpoint.source import resolve  # it pulls in the readers of model files

    config = _config(arguments)
    source = resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
    print(source.path if source.path is not None else f"{source.name} is built in")
    return 0


def list_known(arguments: argparse.Namespace) -> int:
    """Prints what `--model` takes by name: how large it is, and where it lies."""
    from paceline.checkpoint.inventory import KnownModel, known_models

    config = _config(arguments)

    def place(model: KnownModel) -> str:
        if model.path is not None:
            return str(model.path)
        return "built in: random weights" if model.nbytes is None else "not fetched"

    rows = [("model", "size on disk", "kept in")]
    for model in known_models(config.cache_dir):
        rows.append((model.name, "-" if model.nbytes is None else byte_size(model.nbytes), place(model)))
    name_width, size_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, size, where in rows:  # no table: paths are to be copied, and never cut
        print(f"{name:{name_width}}  {size:>{size_width}}  {where}")
    return 0


def _config(arguments: argparse.Namespace) -> RouterConfig:
    flags = {name: value for name, value in vars(arguments).items() if name in ("model", "cache_dir") and value}
    return load(RouterConfig, file=None, env=os.environ, flags=flags)
