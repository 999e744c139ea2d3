"""The engine process's loop: commands in, a step, transfers, timers, one report out.

It owns the engine, the pool and the transfer agent, on one thread. While a write is under way or awaited it comes round
at most 200 us apart (2 ms after long silence), and between the layers of a step it polls the transfers; otherwise it
sleeps on its sockets, so that an idle worker costs no CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from paceline import log
from paceline.config import WorkerConfig
from paceline.engine.request import Chunk, StepOutput
from paceline.errors import EngineUnsound, PacelineError
from paceline.garbage import set_aside_what_lives
from paceline.kvtransfer.agent import AgentEvents
from paceline.prefix import KvChange
from paceline.services.worker.host import Host, build, use_kernels, use_threads
from paceline.services.worker.link import EngineLink
from paceline.services.worker.messages import IDLE, Activity, Alive, FailedStart, Failure, Ping
from paceline.services.worker.process import be_born, wake_in_time
from paceline.types import WorkerLoad

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
POLL_S: Final = 200e-6
"""Longest time between two polls while a write of ours is under way, or one is awaited that may come at any moment."""
SILENT_POLL_S: Final = 2e-3
"""Longest time between two polls while a write is awaited of which nothing has been heard for long."""

MOST_SPOILT: Final = 16
"""Requests in a row whose first logits are NaN or infinite, after which the engine is held for unsound: chance, or a
prompt that the model itself cannot bear, spoils one among others."""

DEVICE_POLL_S: Final = 50e-6
"""Time between two looks at a step or a write of the device's, when there is nothing to launch beside it."""

_log = log.get_logger(__name__)

Command = TypeVar("Command")
Event = TypeVar("Event", bound=msgspec.Struct)
Inbound = TypeVar("Inbound")


class CommandLink(Protocol[Inbound]):
    """What the loop needs of its link; `EngineLink` is the real one."""

    @property
    def file_descriptor(self) -> int:
        """Readable when a command may have come."""

    def receive_all(self) -> list[Inbound]:
        """All commands that are there; never waits."""

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; never waits."""

    def flush(self) -> bool:
        """True when nothing is left to send."""


class EngineLoop(ABC, Generic[Command, Event]):
    """A tier's policy fills in the abstract methods; `run` is the life of the process."""

    def __init__(self, host: Host, link: CommandLink[Command | Ping]) -> None:
        self.engine = host.engine
        self.agent = host.agent
        self.events: list[Event] = []
        """What this round has to tell the front."""
        self._link = link
        self._during_step: list[AgentEvents] = []
        self._deferred: list[Command | Ping] = []  # came during a step, and wait for its end
        self._launched: Sequence[Chunk] = ()
        self._device_busy = False  # the last step had nothing to do but to wait
        self._woken = False  # by a peer
        self._stirred_at = time.monotonic()  # when a command or anything of a peer's came last
        self._reported: object = None
        self._pinged = False

    @abstractmethod
    def handle(self, command: Command) -> None:
        """Carries out a command of the front."""

    def before_step(self) -> None:
        """Called before each step."""

    def launched(self) -> None:
        """Called when the engine has launched a step, also in the middle of `step`, or seen the end of the last one."""

    def handle_between_layers(self, _command: Command) -> bool:
        """Carries out a command that must not wait for the end of a step; False for one that can, as most.

        The engine is in the middle of a step then, and must not be touched.
        """
        return False

    def between_layers(self) -> None:
        """Called between the layers of a step, which is not to change what the step computes."""

    @abstractmethod
    def stepped(self, output: StepOutput) -> None:
        """Takes in what a step did."""

    @abstractmethod
    def transferred(self, events: AgentEvents) -> None:
        """Takes in what the transfers did."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Carries out the timers that are due at `now`, in monotonic seconds."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""

    @property
    @abstractmethod
    def awaiting(self) -> bool:
        """True while a peer's write is awaited."""

    @property
    @abstractmethod
    def load(self) -> WorkerLoad:
        """The load as it is now."""

    @abstractmethod
    def report(
        self, load: WorkerLoad, activity: Activity, events: tuple[Event, ...], kv: tuple[KvChange, ...]
    ) -> msgspec.Struct:
        """This round's message to the front. `load` is as it is now, `kv` what has changed in the prefix cache."""

    def run(self) -> None:
        """Until the front is gone."""
        while True:
            self.round()
            if self._sleep():
                return

    def round(self) -> None:
        """Once through everything there is to do now; never waits."""
        deferred, self._deferred = self._deferred, []
        commands = [*deferred, *self._link.receive_all()]
        if commands:
            self._stirred_at = time.monotonic()
        for command in commands:
            if isinstance(command, Ping):
                self._pinged = True
            else:
                self.handle(command)
        if self.events and self.engine.has_work:
            self.tell(IDLE)  # whoever waits for an answer must not wait for a step besides
        activity = self._step() if self.engine.has_work else IDLE
        activity = self._transfer(activity)
        self.expire(time.monotonic())
        self.tell(activity)

    def _step(self) -> Activity:
        before = replace(self.engine.stats)
        if not self._device_busy:
            self.before_step()
        output = self.engine.step(tick=self._tick)
        self._note_launch()
        self._device_busy = self.engine.in_flight and not output.progress
        if not output.progress and not output.preempted:
            return IDLE
        self.stepped(output)
        stats = self.engine.stats
        if stats.spoilt_in_a_row >= MOST_SPOILT:
            self.tell(IDLE)  # of what failed; who is still in hand hears of the engine's end
            raise EngineUnsound(f"the last {stats.spoilt_in_a_row} requests all began with NaN or infinite logits")
        return Activity(
            step_seconds=output.seconds,
            batch_requests=len(output.progress),
            prompt_tokens=stats.prompt_tokens_computed - before.prompt_tokens_computed,
            generated_tokens=stats.output_tokens - before.output_tokens,
            recomputed_tokens=stats.tokens_recomputed - before.tokens_recomputed,
            preemptions=stats.preemptions - before.preemptions,
            prefix_queried_tokens=stats.prefix_queried_tokens - before.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens - before.prefix_hit_tokens,
        )

    def _note_launch(self) -> None:
        if (chunks := self.engine.launched) is not self._launched:
            self._launched = chunks
            self.launched()

    def _tick(self) -> None:
        """Between two layers: keeps transfers going, and leaves what they did until the step is over."""
        self._note_launch()
        if (self.agent.busy or self.awaiting) and (events := self.agent.poll()):
            self._during_step.append(events)
        for command in self._link.receive_all():
            if isinstance(command, Ping):
                self._link.send(Alive())  # a step may be longer than a front waits for a sign of life
            elif not self.handle_between_layers(command):
                self._deferred.append(command)
        self.between_layers()

    def _transfer(self, activity: Activity) -> Activity:
        pending, self._during_step = self._during_step, []
        if self.agent.busy or self.awaiting or self._woken:
            self._woken = False
            pending.append(self.agent.poll())
        for events in pending:
            if events:
                self._stirred_at = time.monotonic()
                self.transferred(events)
                activity = msgspec.structs.replace(
                    activity,
                    parts_landed=activity.parts_landed + len(events.parts),
                    parts_sent=activity.parts_sent + sum(each.stats.parts for each in events.terminal),
                    writes=activity.writes + _writes(events),
                    failed_writes=activity.failed_writes + sum(each.lost for each in events.terminal),
                )
        return activity

    def tell(self, activity: Activity) -> None:
        """Sends a report, if there is anything new to say: once a round, and earlier where somebody waits for it."""
        load = self.load
        events, self.events = tuple(self.events), []
        kv = self.engine.pool.cache.take_changes()
        if events or kv or activity is not IDLE or load != self._reported or self._pinged:
            self._link.send(self.report(load, activity, events, kv))
            self._reported = load
            self._pinged = False
        else:
            self._link.flush()

    def _sleep(self) -> bool:
        """Waits for the next thing to do; True when the front is gone."""
        if self._deferred or (self.engine.has_work and not self._device_busy):
            timeout: float | None = 0.0
        elif self.engine.in_flight:
            timeout = DEVICE_POLL_S
        elif self.agent.busy:
            timeout = DEVICE_POLL_S if self.engine.runner.depth else POLL_S
        elif self.awaiting:
            timeout = poll_interval(time.monotonic() - self._stirred_at)
        else:
            deadline = self.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._link.flush():  # the front is behind; there is no descriptor that says when it has caught up
                timeout = min(0.01, timeout) if timeout is not None else 0.01
        wake = self.agent.wake_descriptor
        by_peers = [] if wake is None else [wake]
        readable, _, _ = select.select([self._link.file_descriptor, sys.stdin, *by_peers], [], [], timeout)
        self._woken = wake in readable
        return sys.stdin in readable  # nothing ever comes through the pipe but its end


def poll_interval(silence_s: float) -> float:
    """Seconds until the next poll for an awaited write, `silence_s` after anything was last heard.

    The writer is computing: looking every 200 us took a third of a core from it on a machine that both share. What has
    been silent for long may be found late by a sixty-fourth of that.
    """
    return min(SILENT_POLL_S, max(POLL_S, silence_s / 64))


def _writes(events: AgentEvents) -> tuple[tuple[int, float], ...]:
    return tuple((each.stats.num_bytes, each.stats.seconds) for each in events.terminal if each.error is None)


def main(
    service: str,
    config_type: type[WorkerConfig],
    commands: Any,
    policy: Callable[[Host, EngineLink[Any], Any], EngineLoop[Any, Any]],
) -> None:
    """The engine process, from birth to end. `policy` makes the tier's loop from (host, link, config).

    Exits with 2 where it cannot start, with 3 where it has become unsound.
    """
    birth = be_born()
    config = birth.configured(config_type)
    log.configure(service, config.log_level, config.log_json, worker=str(birth.worker))
    link: EngineLink[Any] = EngineLink(Path(birth.link_dir), commands)
    use_threads(config)
    use_kernels(config)
    if config.on_gpu:
        wake_in_time()
    if config.host in _LOOPBACK:
        # UCX listens for its peers on every interface else; whoever reaches it could write to the pool.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    try:
        host = build(config, birth.worker)
    except PacelineError as error:
        link.send(FailedStart(failure=Failure.of(error)))
        link.close()
        sys.exit(2)
    link.send(host.ready)
    loop = policy(host, link, config)
    set_aside_what_lives()
    linger_ms = 0
    try:
        loop.run()
    except EngineUnsound as error:
        _log.error("ending, to be started anew", reason=error.reason, error=error.message)
        linger_ms = 1000
        sys.exit(3)
    finally:
        # Whoever reads after the end would read freed memory: the transport goes first.
        with contextlib.suppress(PacelineError):
            host.agent.close()
        link.close(linger_ms)
