"""How bytes move. `create` picks an implementation of `Transport`; all pass tests/contract/test_transport*.py."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError, StartupError, quote
from paceline.kvtransfer.transports import loopback, nixl
from paceline.kvtransfer.transports.transport import (
    Finished,
    Handle,
    Notification,
    Peer,
    Piece,
    Polled,
    Transport,
    check_pieces,
)

NAMES = ("auto", "nixl", "loopback")
"""What `create` understands."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A transport, its name, and why it is this one: for the worker's log and `paceline status`."""

    transport: Transport
    name: str
    why: str


def create(name: str, agent_name: str, *, hub: loopback.Hub | None = None) -> Chosen:
    """The transport called `name`, one of `NAMES`, for the agent `agent_name`.

    `loopback` joins `hub`, which only tests have. Raises `ConfigError` for an unknown name, `StartupError` where the
    transport that was asked for cannot run here.
    """
    if name == "loopback":
        if hub is None:
            raise ConfigError("transport loopback joins transports of one process only: choose auto or nixl")
        return Chosen(loopback.LoopbackTransport(hub, agent_name), "loopback", "asked for")
    if name == "nixl":
        return Chosen(nixl.NixlTransport(agent_name), "nixl", "asked for")
    if name == "auto":
        reason = nixl.available()
        if reason is not None:
            raise StartupError(f"no transport can run here: {reason}; install paceline[worker]")
        return Chosen(
            nixl.NixlTransport(agent_name), "nixl", "the only one between processes; UCX picks its way per peer"
        )
    raise ConfigError(f"transport {quote(name)} is none of {', '.join(NAMES)}")


__all__ = [
    "NAMES",
    "Chosen",
    "Finished",
    "Handle",
    "Notification",
    "Peer",
    "Piece",
    "Polled",
    "Transport",
    "check_pieces",
    "create",
]
