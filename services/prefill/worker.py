"""The prefill engine process: a policy over the engine that stops each request after its first token.

The life of a prompt here: `StartPrefill` leases its blocks, those that are cached among them, or refuses; `WriteTo`
opens the way to the target's pool; what is cached is posted at once, and after each step the blocks it finished, while
the next chunk computes, or with each step the blocks it fills, where writes follow the device's work; the last part
carries the first token.
The front hears of the first token before the last part is posted: it never waits for a transfer.
"""

from __future__ import annotations

import time
from typing import Final

from paceline.config import PrefillConfig
from paceline.engine.beams import proposing
from paceline.engine.request import Progress, StepOutput
from paceline.errors import InvalidRequest, Overloaded, PacelineError, TransferFailed
from paceline.kvtransfer.agent import AgentEvents
from paceline.log import get_logger
from paceline.prefix import KvChange, root_hash
from paceline.services.prefill.handoff import Handoff
from paceline.services.prefill.messages import (
    COMMANDS,
    AbortAttempt,
    Attempt,
    Measured,
    MeasureTo,
    PrefillCommand,
    Prefilled,
    PrefillEvent,
    PrefillFailed,
    PrefillReport,
    StartPrefill,
    Stopped,
    WriteTo,
)
from paceline.services.worker.host import Host
from paceline.services.worker.loop import CommandLink, EngineLoop, main
from paceline.services.worker.messages import IDLE, Activity, Failure, Ping
from paceline.types import RequestId, WorkerKey, WorkerLoad, check_lengths

_log = get_logger(__name__)

_MEASURE_S: Final = 2.0
"""Longest that a measurement may hold the loop up: less than targets wait for a sign of life."""


class PrefillLoop(EngineLoop[PrefillCommand, PrefillEvent]):
    """Hand-offs by attempt, from acceptance until their last handle is terminal."""

    def __init__(self, host: Host, link: CommandLink[PrefillCommand | Ping], config: PrefillConfig) -> None:
        super().__init__(host, link)
        self._capacity = config.step_requests + config.max_waiting
        self._block_bytes = host.engine.runner.block_bytes
        self._eos_token_ids = host.ready.eos_token_ids
        self._handoffs: dict[Attempt, Handoff] = {}
        self._by_request: dict[RequestId, Handoff] = {}
        self._stopping: dict[Attempt, list[int]] = {}  # the abort calls that wait for an attempt's end
        self._pending_stops: dict[int, int] = {}  # of an abort call: attempts that it still waits for

    @property
    def awaiting(self) -> bool:
        """Nobody writes to a prefill worker."""
        return False

    @property
    def load(self) -> WorkerLoad:
        """The engine's."""
        return self.engine.load

    def report(
        self, load: WorkerLoad, activity: Activity, events: tuple[PrefillEvent, ...], kv: tuple[KvChange, ...]
    ) -> PrefillReport:
        """This round's message."""
        return PrefillReport(load=load, activity=activity, events=events, kv=kv)

    # Commands

    def handle(self, command: PrefillCommand) -> None:
        """Carries out a command of the front."""
        match command:
            case StartPrefill():
                try:
                    self._start(command)
                except PacelineError as error:
                    self._fail(command.attempt, error)
            case WriteTo():
                self._write_to(command)
            case AbortAttempt():
                self._abort(command)
            case MeasureTo():
                self._measure(command)

    def _start(self, command: StartPrefill) -> None:
        attempt = command.attempt
        # The front has checked the ids; this loop is everybody's.
        check_lengths(len(command.prompt), max_tokens=1, limits=self.engine.limits)
        if attempt in self._handoffs:
            raise InvalidRequest("reservation_id", f"attempt {attempt} is in work already")
        if len(self._handoffs) >= self._capacity:
            raise Overloaded(f"{len(self._handoffs)} prompts are in hand, the limit", retry_after_s=0.5)
        scored = command.sampling.prompt_logprobs is not None
        root = None if scored else root_hash(salt=command.cache_salt)
        lease = self.engine.try_reserve(len(command.prompt), prompt=command.prompt, root=root)
        if lease is None:
            raise Overloaded(
                f"the prompt's {len(command.prompt)} tokens do not fit the pool now: "
                f"{self.load.headroom_blocks} of {self.load.total_blocks} blocks are left",
                retry_after_s=0.5,
            )
        handoff = Handoff(
            attempt,
            len(command.prompt),
            lease,
            self.engine.groups,
            release=lambda: self.engine.release(handoff.request_id),
        )
        beams = command.sampling.beam_width is not None  # then the decode worker chooses the first tokens
        self.engine.add(
            handoff.request_id,
            command.prompt,
            proposing(command.sampling, self._eos_token_ids) if beams else command.sampling,
            lease=lease,
            hold=True,
            stop_after=1,
            fanout=1 if beams else command.sampling.n,
            proposes=beams,
            priority=command.priority,
            root=root,
        )
        self._handoffs[attempt] = self._by_request[handoff.request_id] = handoff

    def _write_to(self, command: WriteTo) -> None:
        handoff = self._handoffs.get(command.attempt)
        if handoff is None:
            return  # aborted while its claim was under way
        try:
            self._open(handoff, command)
        except PacelineError as error:
            self._give_up(handoff, error, command.target)

    def _open(self, handoff: Handoff, command: WriteTo) -> None:
        if handoff.outgoing is not None:
            return  # granted twice
        handoff.check_target(command.blocks, command.held_tokens)
        self.agent.connect_peer(command.target, command.agent, command.fingerprint)
        outgoing = self.agent.outgoing(command.target, command.attempt.reservation_id, command.attempt.number)
        handoff.grant(outgoing, command.blocks, command.held_tokens, time.monotonic())

    def _abort(self, command: AbortAttempt) -> None:
        wanted = command.attempt
        found = [
            handoff
            for attempt, handoff in self._handoffs.items()
            if attempt.reservation_id == wanted.reservation_id and wanted.number in (0, attempt.number)
        ]
        if not found:
            self.events.append(Stopped(call_id=command.call_id, found=False))
            return
        self._pending_stops[command.call_id] = len(found)
        for handoff in found:
            self._stopping.setdefault(handoff.attempt, []).append(command.call_id)
            self._cut(handoff, "aborted")

    def _measure(self, command: MeasureTo) -> None:
        """Writes to granted blocks, some times over. It blocks the loop, for milliseconds, once a pair."""
        attempt, failure, speed = command.attempt, None, 0.0
        lease = self.engine.try_scratch(len(command.blocks))
        try:
            if lease is None:
                raise Overloaded("the pool is too full to measure from", retry_after_s=1.0)
            handoff = Handoff(attempt, 0, lease, self.engine.groups, release=lease.release, in_engine=False)
            self._handoffs[attempt] = handoff
            self.agent.connect_peer(command.target, command.agent, command.fingerprint)
            handoff.outgoing = self.agent.outgoing(command.target, attempt.reservation_id, attempt.number)
            speed = self.agent.measure(handoff.outgoing, lease.blocks, command.blocks, timeout_s=_MEASURE_S)
        except PacelineError as error:
            failure = Failure.of(error)
        self.events.append(Measured(attempt=attempt, bytes_per_second=speed, failure=failure))
        if attempt in self._handoffs:
            self._cut(self._handoffs[attempt], "measured")

    # Progress

    def before_step(self) -> None:
        """Notes what has arrived before each chunk."""
        for handoff in self._handoffs.values():
            handoff.chunk_begins()

    def handle_between_layers(self, command: PrefillCommand) -> bool:
        """Takes in a grant: the target counts our silence from its claim on, and only an open way can break it."""
        handoff = self._handoffs.get(command.attempt) if isinstance(command, WriteTo) else None
        if handoff is None or not isinstance(command, WriteTo):
            return False
        try:
            self._open(handoff, command)
        except PacelineError:
            return False  # after the step, where the engine can let go of the prompt, it fails again
        return True

    def between_layers(self) -> None:
        """A step may take longer than targets wait for a sign of life."""
        self.expire(time.monotonic())

    def launched(self) -> None:
        """Posts what the step that was launched last fills, where the target takes it in stream order."""
        reached = {chunk.request.request_id: chunk.end for chunk in self.engine.launched}
        now = time.monotonic()
        for request_id, handoff in self._by_request.items():
            handoff.launched(reached.get(request_id, 0), now)

    def stepped(self, output: StepOutput) -> None:
        """First tells the front of the first tokens, then posts the finished blocks."""
        progressed = [(self._by_request[done.request_id], done) for done in output.progress]
        for handoff, done in progressed:
            handoff.in_engine = not done.ended
            if done.ended:
                self._tell_end(handoff, done)
        self.tell(IDLE)
        now = time.monotonic()
        for handoff, done in progressed:
            if not done.ended:
                handoff.computed(done.computed, now)
            elif done.error is not None or done.finish_reason is not None:
                handoff.cut("the request ended with its first token")
            else:
                handoff.sampled(done.token_ids, done.logprobs, now)
            self._settle(handoff)

    def transferred(self, events: AgentEvents) -> None:
        """Lets go of what is terminal, and gives up what failed."""
        for outgoing in events.settled:
            attempt = Attempt(outgoing.reservation_id, outgoing.attempt)
            handoff = self._handoffs.get(attempt)
            if handoff is not None and handoff.failed:
                # A transport refuses a peer that it lost once; the next hand-off connects anew.
                self.agent.drop_peer(outgoing.target)
                error = TransferFailed(f"writing to {outgoing.target}: {outgoing.error}")
                self._give_up(handoff, error, outgoing.target)
        for outgoing in events.terminal:
            handoff = self._handoffs.get(Attempt(outgoing.reservation_id, outgoing.attempt))
            if handoff is not None:
                self._settle(handoff)

    def expire(self, now: float) -> None:
        """Keeps targets informed of writers whose prompt waits its turn, and lets go of what nobody claims."""
        for handoff in list(self._handoffs.values()):
            if (due := handoff.give_up_at) is not None and due <= now:
                self._give_up(handoff, TransferFailed("nobody granted a claim for it"), None)
            if (due := handoff.keep_alive_at) is not None and due <= now:
                handoff.keep_alive(now)

    def next_deadline(self) -> float | None:
        """The earliest of them."""
        timers = ((each.keep_alive_at, each.give_up_at) for each in self._handoffs.values())
        return min((due for pair in timers for due in pair if due is not None), default=None)

    def _tell_end(self, handoff: Handoff, done: Progress) -> None:
        if done.error is not None:
            self._fail(handoff.attempt, done.error)
            return
        lands = done.finish_reason is None
        self.events.append(
            Prefilled(
                attempt=handoff.attempt,
                tokens=list(done.token_ids),
                finish=done.finish_reason,
                logprobs=done.logprobs,
                prompt_logprobs=done.prompt_logprobs,
                finishes=tuple(each for each in done.finishes if each is not None) if not lands else (),
                blocks=handoff.blocks if lands else 0,
                num_bytes=handoff.blocks * self._block_bytes if lands else 0,
                parts=handoff.parts if lands else 0,
                parts_before_last_chunk=handoff.parts_before_last_chunk,
                cached_tokens=handoff.cached_tokens,
            )
        )

    def _give_up(self, handoff: Handoff, error: PacelineError, target: WorkerKey | None) -> None:
        """The hand-off cannot go on; the front decides who is to know. `target` has granted the claim, and waits."""
        _log.warning("hand-off given up", attempt=str(handoff.attempt), reason=error.reason, error=error.message)
        self._fail(handoff.attempt, error, target)
        self._cut(handoff, error.message)

    def _fail(self, attempt: Attempt, error: PacelineError, target: WorkerKey | None = None) -> None:
        self.events.append(PrefillFailed(attempt=attempt, failure=Failure.of(error), target=target))

    def _cut(self, handoff: Handoff, reason: str) -> None:
        if handoff.in_engine:
            self.engine.abort(handoff.request_id)
            handoff.in_engine = False
        handoff.cut(reason)
        self._settle(handoff)

    def _settle(self, handoff: Handoff) -> None:
        """Gives the blocks of a terminal hand-off back, and answers whoever waits for its end."""
        if not handoff.terminal or handoff.attempt not in self._handoffs:
            return
        del self._handoffs[handoff.attempt]
        self._by_request.pop(handoff.request_id, None)
        handoff.release()
        for call_id in self._stopping.pop(handoff.attempt, ()):
            self._pending_stops[call_id] -= 1
            if self._pending_stops[call_id] == 0:
                del self._pending_stops[call_id]
                self.events.append(Stopped(call_id=call_id, found=True))


if __name__ == "__main__":
    main("prefill-engine", PrefillConfig, COMMANDS, PrefillLoop)
