"""`paceline router`, `prefill` and `decode`: one role in the foreground."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Coroutine
from typing import Final

import uvloop

from paceline import log
from paceline.cli.child import die_with_parent
from paceline.cli.variables import warn_of_unknown_variables
from paceline.config import SECTIONS, CommonConfig, DecodeConfig, PrefillConfig, load
from paceline.errors import StartupError

_SERVERS: Final = {
    "router": "paceline.services.router.server",
    "prefill": "paceline.services.prefill.front",
    "decode": "paceline.services.decode.front",
}
_WORKER_PACKAGES: Final = frozenset({"torch", "zmq", "nixl", "numpy", "safetensors"})

Serve = Callable[[CommonConfig], Coroutine[object, object, int | None]]


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C. The exit status is the service's own; StartupError where it cannot start."""
    role: str = arguments.command
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    config = load(SECTIONS[role], file=arguments.config, env=os.environ, flags=vars(arguments))
    worker = config.worker_id if isinstance(config, PrefillConfig | DecodeConfig) else None
    log.configure(role, config.log_level, config.log_json, worker=worker)
    if arguments.die_with_parent is None:  # else the parent has said it
        warn_of_unknown_variables(os.environ)
    return uvloop.run(_serve_of(role)(config)) or 0


def _serve_of(role: str) -> Serve:
    try:
        serve: Serve = importlib.import_module(_SERVERS[role]).serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _WORKER_PACKAGES:
            raise
        raise StartupError(
            f"a {role} worker needs the package {error.name}: install paceline[worker], the base is router and client"
        ) from error
    return serve
