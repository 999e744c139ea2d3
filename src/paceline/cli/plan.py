"""What `paceline up` runs: each role's settings, port and command line, worked out before anything starts.

A role takes each setting from where it would by itself (file, environment), and besides what `up` was given: on its
command line, or in its own table of the file where the role's says nothing.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from paceline.cli.supervisor import RoleSpec
from paceline.config import SECTIONS, CommonConfig, UpConfig, ensure_run_dir, flags_for, load
from paceline.errors import AddressInUse, ConfigError
from paceline.settings import settings_of

ROUTER: Final = "router"
_ALWAYS: Final = ("host", "model", "cache_dir", "offline", "grace_s", "log_json", "log_level")
_OWN: Final = frozenset({"port", "metrics_port", "run_dir", "threads"})
_FREE_PORTS: Final = range(20_000, 30_000)
_ATTEMPTS: Final = 50
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where settings come from, besides their defaults. `per_role` has a role's or one worker's own, by name."""

    flags: Mapping[str, object]
    file: Path | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(os.environ))
    per_role: Mapping[str, Mapping[str, object]] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All roles to run, the router first. `address` is where clients on this machine reach the router."""

    address: str
    roles: tuple[RoleSpec, ...]

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers, which are their worker ids."""
        return tuple(role.name for role in self.roles if role.name != ROUTER)


def make_plan(config: UpConfig, sources: Sources, *, parent: int) -> Plan:
    """The plan for `config`; roles die with the process `parent`. Raises ConfigError for a role's bad setting."""
    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(getattr(config, role))]
    ports = _ports(config, names)
    address = f"{_reachable(config.host)}:{ports[ROUTER]}"
    # Two clusters of one user must not take each other's worker ids.
    run_dir = ensure_run_dir(ensure_run_dir(config.run_dir) / str(ports[ROUTER]))
    # The tiers compute in turn, more often than not, and workers of one tier at once. So each tier gets all cores: its
    # waiting threads sleep, and take little from the other tier.
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // max(config.prefill, config.decode))
    roles = []
    for index, name in enumerate((ROUTER, *names)):
        own: dict[str, object] = {"port": ports[name], "run_dir": run_dir}
        own["metrics_port"] = config.metrics_port + index if config.metrics_port else config.metrics_port
        if name != ROUTER:
            own |= {"worker_id": name, "router": (address,), "threads": threads, **_device(config, name)}
        roles.append(_spec(name, config, own, sources, parent))
    return Plan(address=address, roles=tuple(roles))


def _device(config: UpConfig, name: str) -> dict[str, object]:
    """The worker's own device, where the devices of its tier are listed: they take turns."""
    role, _, index = name.partition("-")
    devices: tuple[str, ...] = getattr(config, f"{role}_devices")
    return {"device": devices[int(index) % len(devices)]} if devices else {}


def _spec(name: str, config: UpConfig, own: Mapping[str, object], sources: Sources, parent: int) -> RoleSpec:
    role = name.partition("-")[0]
    cls = SECTIONS[role]
    known = settings_of(cls)
    given = {**_handed_on(config, cls, sources), **own}
    given |= {key: value for key, value in sources.per_role.get(role, {}).items() if key in known}
    given |= {key: value for key, value in sources.per_role.get(name, {}).items() if key in known}
    load(cls, file=sources.file, env=sources.env, flags=given)  # to refuse here, before anything starts
    command = [sys.executable, "-P", "-m", "paceline.cli", role, f"--die-with-parent={parent}"]
    if sources.file is not None:
        command.append(f"--config={sources.file.absolute()}")
    return RoleSpec(name=name, command=(*command, *flags_for(cls, given)), stops_last=role != ROUTER)


def _handed_on(config: UpConfig, cls: type[CommonConfig], sources: Sources) -> dict[str, object]:
    by_itself = load(cls, file=sources.file, env=sources.env, flags={})
    handed: dict[str, object] = {}
    for name, setting in settings_of(cls).items():
        if name in sources.flags and name not in settings_of(UpConfig):
            handed[name] = sources.flags[name]  # of a role alone: the command line of `up` has no such flag
        elif name in settings_of(UpConfig) and name not in _OWN:
            value: Any = getattr(config, name)
            only_up_has_it = getattr(by_itself, name) == setting.default != value
            if value is None and setting.is_bool:
                continue  # there is no flag for it, and it is the default
            if name in _ALWAYS or name in sources.flags or only_up_has_it:
                handed[name] = value
    return handed


def _ports(config: UpConfig, names: list[str]) -> dict[str, int]:
    """A port for each role: those that were asked for, a free one for the router, and 0 for the other workers.

    A worker takes its own free port when it listens, and registers that one. A port chosen for it here could be
    another process's by then.
    """
    firsts = {"prefill": config.prefill_port, "decode": config.decode_port}
    ports = {ROUTER: config.port}
    for name in names:
        role, _, index = name.partition("-")
        ports[name] = firsts[role] + int(index) if firsts[role] else 0
    asked = [port for port in ports.values() if port]
    for port in asked:
        if asked.count(port) > 1:
            raise ConfigError(f"port {port} is asked for twice: port, prefill_port and decode_port overlap")
        _check_free(config.host, port)
    # The workers' command lines name the router's port, so it cannot wait; and it is checked that the host is ours.
    (free,) = free_ports(config.host, 1)
    return ports | {ROUTER: ports[ROUTER] or free}


def free_ports(host: str, count: int) -> list[int]:
    """Distinct ports that nobody listens on right now.

    They lie below the range that systems hand out by default, so that no outgoing connection takes one before it is
    listened on. Raises AddressInUse where `host` cannot be listened on at all.
    """
    with ExitStack() as stack:
        return [stack.enter_context(_any_bound(host)).getsockname()[1] for _ in range(count)]


def _any_bound(host: str) -> socket.socket:
    for _ in range(_ATTEMPTS - 1):
        with suppress(AddressInUse):
            return _bound(host, random.choice(_FREE_PORTS), reuse=False)
    return _bound(host, random.choice(_FREE_PORTS), reuse=False)


def _check_free(host: str, port: int) -> None:
    # Before anything starts: else the workers would register with another cluster's router.
    _bound(host, port).close()


def _bound(host: str, port: int, *, reuse: bool = True) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # As gRPC's server does: what is left of closed connections does not count, a listener does. Probes that are
        # held together go without, as they could share a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        probe.bind((host.strip("[]"), port))
    except OSError as error:
        probe.close()
        raise AddressInUse(f"port {port} of {host} cannot be listened on: {error.strerror}") from error
    return probe


def _reachable(host: str) -> str:
    host = _WILDCARDS.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
