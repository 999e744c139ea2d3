"""An engine process that computes nothing: fronts and routers are measured with it, undisturbed by a model.

A prompt is answered at once. A request on a decode worker gets one token a step, together with all others; steps are
$STAND_IN_STEP_MS apart. What it says is what an engine says, in one report a step.
"""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.checkpoint.dummy import SHAPES
from paceline.errors import UnknownReservation
from paceline.kvtransfer.layout import Fingerprint
from paceline.services.decode.messages import COMMANDS as DECODE_COMMANDS
from paceline.services.decode.messages import (
    CallRefused,
    ClaimWrite,
    DecodeReport,
    EndRequest,
    NewTokens,
    Over,
    Reserve,
    Reserved,
    WriteGranted,
)
from paceline.services.prefill.messages import COMMANDS as PREFILL_COMMANDS
from paceline.services.prefill.messages import (
    AbortAttempt,
    Measured,
    MeasureTo,
    Prefilled,
    PrefillReport,
    StartPrefill,
    Stopped,
)
from paceline.services.worker.link import EngineLink
from paceline.services.worker.messages import Activity, Failure, Ping, Ready
from paceline.services.worker.process import Birth, be_born
from paceline.types import FinishReason, Limits, ReservationId, WorkerLoad, blocks_for

TOKEN: Final = 65
SHAPE: Final = SHAPES["smollm2-135m"]
"""The model that is said to be served: its context takes long prompts."""
LIMITS: Final = Limits(vocab_size=SHAPE.vocab_size, context_tokens=SHAPE.context_tokens, pool_blocks=2**20)
_HAND_OFF_S: Final = 0.02  # of a remote prompt: from the claim until its KV has landed
_LOAD: Final = WorkerLoad(total_blocks=LIMITS.pool_blocks, free_blocks=LIMITS.pool_blocks)


@dataclass
class _Request:
    tokens_left: int
    starts_at: float | None  # None: it waits for its writer
    index: int = 0


class StandIn:
    """Answers commands, and steps."""

    def __init__(self, birth: Birth) -> None:
        self._prefill = birth.worker.worker_id.startswith("prefill")
        commands: Any = PREFILL_COMMANDS if self._prefill else DECODE_COMMANDS
        self._link: EngineLink[Any] = EngineLink(Path(birth.link_dir), commands)
        self._step_s = float(os.environ.get("STAND_IN_STEP_MS", "5")) / 1e3
        self._requests: dict[ReservationId, _Request] = {}
        self._events: list[Any] = []
        self._pinged = False
        fingerprint = Fingerprint(
            format_version=1,
            model=SHAPE.name,
            weights_digest="none",
            dtype="float32",
            layers=1,
            kv_heads=1,
            head_dim=16,
            block_tokens=16,
        )
        self._link.send(Ready(limits=LIMITS, fingerprint=fingerprint, eos_token_ids=(2,), transport="none"))

    def run(self) -> None:
        """Until the front is gone."""
        due = time.monotonic()
        while True:
            for command in self._link.receive_all():
                self._handle(command)
            self._tell(0.0)
            if self._requests and (now := time.monotonic()) >= due:
                due = max(due + self._step_s, now)
                self._step(now)
                self._tell(self._step_s)
            wait = max(0.0, due - time.monotonic()) if self._requests else None
            readable, _, _ = select.select([self._link.file_descriptor, sys.stdin], [], [], wait)
            if sys.stdin in readable:
                return

    def _handle(self, command: Any) -> None:
        match command:
            case Ping():
                self._pinged = True
            case StartPrefill():
                blocks = blocks_for(len(command.prompt))
                answer = Prefilled(
                    attempt=command.attempt,
                    tokens=[TOKEN],
                    finish=None,
                    blocks=blocks,
                    num_bytes=blocks,
                    parts=1,
                    parts_before_last_chunk=0,
                )
                self._events.append(answer)
            case AbortAttempt():
                self._events.append(Stopped(call_id=command.call_id, found=True))
            case MeasureTo():
                self._events.append(Measured(attempt=command.attempt, bytes_per_second=1e12))
            case Reserve():
                starts_at = time.monotonic() if command.local else None
                self._requests[command.reservation_id] = _Request(command.sampling.max_tokens, starts_at)
                self._events.append(Reserved(reservation_id=command.reservation_id))
            case ClaimWrite():
                self._claimed(command)
            case EndRequest() if self._requests.pop(command.reservation_id, None) is not None:
                self._events.append(Over(reservation_id=command.reservation_id, finish=FinishReason.CANCELLED))
            case _:
                pass

    def _claimed(self, command: ClaimWrite) -> None:
        request = self._requests.get(command.reservation_id)
        if request is None:  # it comes right away, and the claim is repeated
            failure = Failure.of(UnknownReservation(f"{command.reservation_id!r} is not known here"))
            self._events.append(CallRefused(call_id=command.call_id, failure=failure))
            return
        request.starts_at = time.monotonic() + _HAND_OFF_S
        self._events.append(WriteGranted(call_id=command.call_id, blocks=[0], held_tokens=0, agent=b""))

    def _step(self, now: float) -> None:
        for reservation, request in list(self._requests.items()):
            if request.starts_at is None or request.starts_at > now:
                continue
            self._events.append(NewTokens(reservation_id=reservation, ids=[TOKEN], index=request.index))
            request.index += 1
            request.tokens_left -= 1
            if not request.tokens_left:
                del self._requests[reservation]
                self._events.append(
                    Over(reservation_id=reservation, finish=FinishReason.LENGTH, completion_tokens=request.index)
                )

    def _tell(self, step_s: float) -> None:
        events, self._events = tuple(self._events), []
        if not events and not self._pinged:
            self._link.flush()
            return
        self._pinged = False
        activity = Activity(step_seconds=step_s, batch_requests=len(events), generated_tokens=len(events))
        report: Any = PrefillReport if self._prefill else DecodeReport
        self._link.send(report(load=_LOAD, activity=activity, events=events))


if __name__ == "__main__":
    StandIn(be_born()).run()
