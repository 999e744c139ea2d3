"""A prefill and a decode engine loop in one process, over the loopback transport: real engines, no sockets, no clock to
wait for. The test plays both fronts: it sends commands, pumps rounds, and reads events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paceline.config import DecodeConfig, PrefillConfig
from paceline.kvtransfer.transports.loopback import Hub
from paceline.services.decode.messages import (
    ClaimWrite,
    EndRequest,
    GiveUpAttempt,
    NewTokens,
    Over,
    Reserve,
    StopWriter,
    WriteGranted,
    WriterStopped,
)
from paceline.services.decode.worker import DecodeLoop
from paceline.services.prefill.messages import AbortAttempt, Attempt, Prefilled, StartPrefill, Stopped, WriteTo
from paceline.services.prefill.worker import PrefillLoop
from paceline.services.worker.host import build
from paceline.services.worker.messages import Activity, Alive, Ping, Report
from paceline.types import ReservationId, SamplingParams, WorkerKey


class MemoryLink:
    """A link's engine end, whose other end is two lists."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.events: list[Any] = []
        self.activities: list[Activity] = []
        self.ended: list[tuple[str, str, int]] = []
        self.reservations: dict[str, int] = {}
        self.alive = 0  # signs of life in the middle of a step

    @property
    def file_descriptor(self) -> int:
        """Nobody waits on it."""
        raise AssertionError("a pumped loop never sleeps")

    def receive_all(self) -> list[Any]:
        """All commands that were sent."""
        commands, self.commands = self.commands, []
        return commands

    def send(self, message: msgspec.Struct) -> None:
        """Keeps the report's events, what was done, and what it says of reservations."""
        if isinstance(message, Alive):
            self.alive += 1
            return
        assert isinstance(message, Report), "an engine sends reports, and signs of life"
        self.events.extend(getattr(message, "events", ()))
        self.activities.append(message.activity)
        self.ended.extend(getattr(message, "ended", ()))
        self.reservations = getattr(message, "reservations", {})

    def flush(self) -> bool:
        """Nothing is ever left."""
        return True


class Pair:
    """One prefill and one decode worker, with a model of equal weights, a tiny one by default.

    Requests end when the test says so.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefill_blocks: int = 64,
        decode_blocks: int = 64,
        prefix_cache: bool = True,
        model: str = "dummy:tiny",
        overlapped: bool = False,
        **settings: Any,
    ) -> None:
        """Steps are `overlapped` as on a GPU: each is launched before the one before it has told its tokens, and writes
        are taken behind what was launched.
        """
        self.hub = Hub(in_stream=overlapped)
        shared: dict[str, Any] = {
            "model": model,
            "transport": "loopback",
            "threads": 1,
            "max_batch_tokens": 32,
            "cache_dir": folder,
            "run_dir": folder,
            "prefix_cache": prefix_cache,
        }
        self.prefill_key, self.decode_key = WorkerKey("prefill-0", 1), WorkerKey("decode-0", 1)
        prefill_config = PrefillConfig(pool_blocks=prefill_blocks, **shared)
        decode_config = DecodeConfig(pool_blocks=decode_blocks, **shared, **settings)
        self._prefill_link, self._decode_link = MemoryLink(), MemoryLink()
        prefill_host = build(prefill_config, self.prefill_key, hub=self.hub)
        decode_host = build(decode_config, self.decode_key, hub=self.hub)
        for host in (prefill_host, decode_host):
            assert not (overlapped and host.engine.groups.windowed), "windows are planned for with the depth"
            host.engine.runner.depth = int(overlapped)
        self.fingerprint = decode_host.ready.fingerprint
        self.prefill = PrefillLoop(prefill_host, self._prefill_link, prefill_config)
        self.decode = DecodeLoop(decode_host, self._decode_link, decode_config)
        self._calls = 0
        self._stopping: dict[int, StopWriter] = {}  # by the abort call that carries it

    @property
    def prefill_alive(self) -> int:
        """Signs of life that the prefill engine gave in the middle of steps."""
        return self._prefill_link.alive

    # What the fronts would send

    def ping_prefill(self) -> None:
        """Asks the prefill engine for a sign of life."""
        self._prefill_link.commands.append(Ping())

    def reserve(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        local: bool = False,
        priority: int = 0,
        salt: str = "",
    ) -> None:
        """The router's call on the decode worker."""
        self._decode_link.commands.append(
            Reserve(
                reservation_id=ReservationId(name),
                prompt=prompt,
                sampling=sampling,
                local=local,
                priority=priority,
                cache_salt=salt,
            )
        )

    def start(
        self, name: str, prompt: list[int], sampling: SamplingParams, *, attempt: int = 1, salt: str = ""
    ) -> None:
        """The router's call on the prefill worker."""
        self._prefill_link.commands.append(
            StartPrefill(
                attempt=Attempt(ReservationId(name), attempt), prompt=prompt, sampling=sampling, cache_salt=salt
            )
        )

    def claim(self, name: str, *, attempt: int = 1, most: int | None = None) -> WriteGranted:
        """The prefill worker's claim, carried there and back; of the granted blocks, it hears of `most`."""
        self._calls += 1
        self._decode_link.commands.append(
            ClaimWrite(
                call_id=self._calls,
                reservation_id=ReservationId(name),
                attempt=attempt,
                writer=self.prefill_key,
                fingerprint=self.fingerprint,
            )
        )
        self.decode.round()
        granted: WriteGranted
        [granted] = self.take_decode(WriteGranted)
        self._prefill_link.commands.append(
            WriteTo(
                attempt=Attempt(ReservationId(name), attempt),
                target=self.decode_key,
                blocks=granted.blocks[:most],
                held_tokens=granted.held_tokens,
                agent=granted.agent,
                fingerprint=self.fingerprint,
            )
        )
        return granted

    def cancel(self, name: str) -> None:
        """The router's stream to the decode worker is gone."""
        self._decode_link.commands.append(EndRequest(reservation_id=ReservationId(name), cause="stream_lost"))

    def retarget(self, name: str, *, attempt: int = 1, local: bool = False) -> None:
        """The router gives an attempt up."""
        self._calls += 1
        self._decode_link.commands.append(
            GiveUpAttempt(call_id=self._calls, reservation_id=ReservationId(name), attempt=attempt, local=local)
        )

    def abort_prefill(self, name: str, *, attempt: int = 1) -> None:
        """The decode worker's order to stop, or the router's."""
        self._calls += 1
        self._prefill_link.commands.append(
            AbortAttempt(attempt=Attempt(ReservationId(name), attempt), call_id=self._calls)
        )

    def tell_decode(self, command: Any) -> None:
        """Any other command of the decode front."""
        self._decode_link.commands.append(command)

    def hand_over(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        """A request up to its granted claim."""
        self.reserve(name, prompt, sampling)
        self.decode.round()
        self.start(name, prompt, sampling)
        self.claim(name)

    # Progress

    def pump(self, rounds: int = 1) -> None:
        """Both loops come round; orders to stop are carried to the writer, and its answers back."""
        for _ in range(rounds):
            self.prefill.round()
            self.decode.round()
            self._carry_stops()

    def pump_until_idle(self, most: int = 2000) -> None:
        """Until nothing is left anywhere; fails if that takes too many rounds."""
        for _ in range(most):
            self.pump()
            if self.idle:
                return
        raise AssertionError(f"not idle after {most} rounds: {self.prefill.load}, {self.decode.load}")

    def pump_until_landed(self, most: int = 2000) -> None:
        """Until a reservation is landed, and has not run; fails if that takes too many rounds."""
        for _ in range(most):
            self.pump()
            if self.reservations.get("landed"):
                return
        raise AssertionError(f"nothing landed in {most} rounds: {self.reservations}")

    def take_ended(self) -> list[tuple[str, str, int]]:
        """Removes and returns the ends of reservations: state before, cause, number."""
        ended, self._decode_link.ended = self._decode_link.ended, []
        return ended

    @property
    def reservations(self) -> dict[str, int]:
        """Reservations by their state, as the decode engine has reported them last."""
        return self._decode_link.reservations

    @property
    def idle(self) -> bool:
        """True when every block is back on both sides, and nobody waits."""
        loads = (self.prefill.load, self.decode.load)
        return all(
            load.committed_blocks == 0 and load.free_blocks == load.total_blocks and load.running + load.waiting == 0
            for load in loads
        )

    def take_decode(self, kind: type[Any]) -> list[Any]:
        """Removes and returns the decode engine's events of one kind."""
        return _take(self._decode_link.events, kind)

    def take_prefill(self, kind: type[Any]) -> list[Any]:
        """Removes and returns the prefill engine's events of one kind."""
        return _take(self._prefill_link.events, kind)

    def prefill_activity(self, name: str) -> int:
        """A figure of what the prefill engine has done, summed over its rounds."""
        return sum(getattr(activity, name) for activity in self._prefill_link.activities)

    def tokens(self, name: str) -> list[int]:
        """What the decode engine has told of a request's answer; removes it."""
        found = [event for event in self._decode_link.events if isinstance(event, NewTokens)]
        mine = [event for event in found if event.reservation_id == name]
        for event in mine:
            self._decode_link.events.remove(event)
        return [token for event in sorted(mine, key=lambda event: event.index) for token in event.ids]

    def over(self, name: str) -> Over:
        """The one end of a request; removes it."""
        [over] = [event for event in self.take_decode(Over) if event.reservation_id == name]
        assert isinstance(over, Over)
        return over

    def first_tokens(self) -> list[Prefilled]:
        """What the prefill engine has told; removes it."""
        return self.take_prefill(Prefilled)

    def _carry_stops(self) -> None:
        for order in self.take_decode(StopWriter):
            self.abort_prefill(order.reservation_id, attempt=order.attempt)
            self._stopping[self._calls] = order
        for stopped in self.take_prefill(Stopped):
            order = self._stopping.pop(stopped.call_id, None)
            if order is not None:
                self._decode_link.commands.append(
                    WriterStopped(reservation_id=order.reservation_id, attempt=order.attempt, writer=order.writer)
                )


def _take(events: list[Any], kind: type[Any]) -> list[Any]:
    taken = [event for event in events if isinstance(event, kind)]
    events[:] = [event for event in events if not isinstance(event, kind)]
    return taken
