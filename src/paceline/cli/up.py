"""`paceline up`: a router, prefill and decode workers on this machine, kept alive until Ctrl-C.

The model is fetched first, once; then all roles start together; the start is over when the router serves and knows
every worker. From then on this process sleeps until a role dies or a signal comes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time

import msgspec

from paceline import log
from paceline.cli.output import print_error
from paceline.cli.plan import ROUTER, Plan, Sources, make_plan
from paceline.cli.readiness import States, wait_ready
from paceline.cli.screen import Screen
from paceline.cli.supervisor import Supervisor
from paceline.cli.variables import warn_of_unknown_variables
from paceline.config import UpConfig, load


def run(arguments: argparse.Namespace) -> int:
    """0 after a clean stop; 2 where a role cannot start; 1 where one keeps dying, or not all are ready in time."""
    sources = Sources(flags=vars(arguments), file=arguments.config)
    config = load(UpConfig, file=sources.file, env=sources.env, flags=sources.flags)
    terminal = sys.stderr.isatty() and config.log_json is not True
    config = msgspec.structs.replace(config, log_json=not terminal if config.log_json is None else config.log_json)
    log.configure("up", config.log_level, config.log_json)
    warn_of_unknown_variables(os.environ)
    _fetch(config)
    plan = make_plan(config, sources, parent=os.getpid())
    names = [role.name for role in plan.roles]
    with Screen(names, terminal=terminal, log_dir=arguments.log_dir) as screen:
        return asyncio.run(_Up(config, plan, screen).run())


def _fetch(config: UpConfig) -> None:
    from paceline.checkpoint.source import resolve  # it pulls in the readers of model files

    resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)


class _Up:
    def __init__(self, config: UpConfig, plan: Plan, screen: Screen) -> None:
        self._config = config
        self._plan = plan
        self._screen = screen
        self._states: States = {}
        self._late = False
        self._signals = 0  # that asked for the end

    async def run(self) -> int:
        supervisor = Supervisor(
            self._plan.roles,
            grace_s=self._config.grace_s,
            max_deaths=self._config.max_deaths,
            window_s=self._config.death_window_s,
            on_line=self._screen.on_line,
            on_event=self._screen.on_event,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, supervisor)
        announcer = asyncio.create_task(self._announce(supervisor))
        failure = await supervisor.run()
        announcer.cancel()
        if failure is not None:
            self._screen.failed(failure)
            return 2 if failure.cannot_start else 1
        if supervisor.unclean:
            how = "stopped at once" if self._signals > 1 else "did not stop cleanly"
            print_error(f"{how}: {', '.join(supervisor.unclean)}")
        return 1 if self._late or supervisor.unclean else 0

    def _on_signal(self, supervisor: Supervisor) -> None:
        self._signals += 1
        if self._signals <= 2:  # there is nothing more to ask for
            self._screen.stopping(at_once=self._signals == 2)
        supervisor.stop()

    async def _announce(self, supervisor: Supervisor) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                await wait_ready(
                    self._plan.address,
                    self._plan.workers,
                    router_pid=lambda: supervisor.pid(ROUTER),
                    on_change=self._on_change,
                )
        except TimeoutError:
            missing = [name for name, ready in self._states.items() if not ready]
            print_error(f"not ready after {self._config.ready_timeout_s:g} s: {', '.join(missing)}")
            self._late = True
            supervisor.stop()
            return
        supervisor.mark_served()
        self._screen.ready(self._plan.address, self._config.model, took_s=time.monotonic() - started)

    def _on_change(self, states: States) -> None:
        self._states = states
        self._screen.on_change(states)
