"""How bytes move. `create` picks an implementation of `Transport`; all pass tests/contract/test_transport*.py."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError, StartupError, quote
from paceline.kvtransfer.region import DeviceKind
from paceline.kvtransfer.transports import cuda_ipc, loopback, nixl, ucxx
from paceline.kvtransfer.transports.by_peer import ByPeerTransport
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

NAMES = ("auto", "nixl", "cuda_ipc", "ucxx", "loopback")
"""What `create` understands."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A transport, its name, and why it is this one: for the worker's log and `paceline status`."""

    transport: Transport
    name: str
    why: str


def create(name: str, agent_name: str, *, hub: loopback.Hub | None = None, device: DeviceKind = "cpu") -> Chosen:
    """The transport called `name`, one of `NAMES`, for the agent `agent_name` and a pool on `device`.

    `loopback` joins `hub`, which only tests have. Raises `ConfigError` for an unknown name or one that does not move
    such memory, `StartupError` where the transport that was asked for cannot run here.
    """
    if name == "loopback":
        if hub is None:
            raise ConfigError("transport loopback joins transports of one process only: choose auto or nixl")
        return Chosen(loopback.LoopbackTransport(hub, agent_name), "loopback", "asked for")
    if name == "nixl":
        return Chosen(nixl.NixlTransport(agent_name), "nixl", "asked for")
    if name == "ucxx":
        return Chosen(ucxx.UcxxTransport(agent_name), "ucxx", "asked for")
    if name == "cuda_ipc":
        if device != "cuda":
            raise ConfigError(f"transport cuda_ipc moves KV between GPUs, and the pool is on {device}: choose auto")
        return Chosen(cuda_ipc.CudaIpcTransport(agent_name), "cuda_ipc", "asked for")
    if name == "auto":
        return _for_gpu(agent_name) if device == "cuda" else _for_host(agent_name)
    raise ConfigError(f"transport {quote(name)} is none of {', '.join(NAMES)}")


def _for_host(agent_name: str) -> Chosen:
    reason = nixl.available()
    if reason is not None:
        raise StartupError(f"no transport can run here: {reason}; install paceline[worker]")
    return Chosen(nixl.NixlTransport(agent_name), "nixl", "the only one between processes; UCX picks its way per peer")


def _for_gpu(agent_name: str) -> Chosen:
    """Whether two workers' GPUs reach each other is known to the pair alone, so each peer is tried in turn."""
    members: dict[str, Transport] = {}
    reasons: dict[str, str] = {}
    for kind, available, make in (
        ("cuda_ipc", cuda_ipc.available, cuda_ipc.CudaIpcTransport),
        ("nixl", nixl.available, nixl.NixlTransport),
    ):
        try:
            reason = available()
            if reason is None:
                members[kind] = make(agent_name)
        except StartupError as error:
            reason = error.message
        if reason is not None:
            reasons[kind] = reason
    if not members:
        raise StartupError(f"no transport can run here: {'; '.join(reasons.values())}; install paceline[worker]")
    why = "between GPUs of one host that reach each other cuda_ipc, else nixl; each peer's choice is logged"
    for kind, reason in reasons.items():
        why = f"no {kind}: {reason}"
    return Chosen(ByPeerTransport(members), "+".join(members), why)


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
