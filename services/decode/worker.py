"""The decode engine process: reservations joined to the engine and to the transfers that land in its pool.

The life of a request here: `Reserve` leases blocks for the prompt, those that are cached among them, or refuses; a
prefill worker claims the others and fills them; when all parts have landed the engine takes the request in its next
step, as one whose prompt is computed already. `reservations` decides what happens when; this file carries it out.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from paceline.config import DecodeConfig
from paceline.engine.block_pool import BlockLease
from paceline.engine.request import Progress, StepOutput
from paceline.errors import EngineError, NoWorker, Overloaded, PacelineError, TransferFailed
from paceline.kvtransfer.agent import AgentEvents
from paceline.kvtransfer.transfer import PartNotification
from paceline.log import get_logger
from paceline.prefix import KvChange, root_hash
from paceline.services.decode.choices import Choice
from paceline.services.decode.messages import (
    COMMANDS,
    CallRefused,
    ClaimWrite,
    DecodeCommand,
    DecodeEvent,
    DecodeReport,
    EndChoice,
    EndRequest,
    GiveUpAttempt,
    MustRestart,
    Over,
    QuarantineAlarm,
    Redirected,
    Reserve,
    Reserved,
    StopWriter,
    WriteGranted,
    WriterDead,
    WriterStopped,
)
from paceline.services.decode.request import LiveRequest
from paceline.services.decode.reservation_actions import (
    AbortWriter,
    Action,
    Alarm,
    DrainAndRestart,
    End,
    Grant,
    Land,
    NewTarget,
    Refuse,
    StartLocalPrefill,
)
from paceline.services.decode.reservation_events import (
    Cancel,
    Claim,
    EndCause,
    Event,
    Part,
    Preempted,
    PromptComputed,
    Retarget,
    StepTaken,
    Target,
    WriterProvenDead,
    WriterTerminal,
)
from paceline.services.decode.reservation_states import Patience, State
from paceline.services.decode.reservations import Reservations
from paceline.services.decode.running import RunningChoices
from paceline.services.worker.host import Host
from paceline.services.worker.loop import CommandLink, EngineLoop, main
from paceline.services.worker.messages import Activity, Failure, Ping
from paceline.types import (
    BLOCK_TOKENS,
    FinishReason,
    ReservationId,
    WorkerLoad,
    blocks_to_admit,
    check_lengths,
)

_log = get_logger(__name__)


class DecodeLoop(EngineLoop[DecodeCommand, DecodeEvent]):
    """Feeds events to the reservations, and carries out their actions."""

    def __init__(self, host: Host, link: CommandLink[DecodeCommand | Ping], config: DecodeConfig) -> None:
        super().__init__(host, link)
        self._capacity = config.step_requests + config.max_waiting
        self._may_prefill = config.local_prefill != "never"
        self._fingerprint = host.ready.fingerprint
        self._block_bytes = host.engine.runner.block_bytes
        self._requests: dict[ReservationId, LiveRequest] = {}
        self._choices = RunningChoices(
            host.engine,
            self._requests,
            host.ready.eos_token_ids,
            tell=self._tell_front,
            feed=self._feed,
        )
        self._reservations: Reservations[BlockLease] = Reservations(
            pool_blocks=host.engine.pool.total,
            allocate=self._reserve_again,
            patience=Patience(config.claim_timeout_s, config.silence_timeout_s),
            alarm_s=config.quarantine_alarm_s,
            drain_fraction=config.quarantine_limit,
        )
        self._ignored: Counter[str] = Counter()
        self._ended: Counter[tuple[State, EndCause]] = Counter()

    @property
    def awaiting(self) -> bool:
        """True while a claim or a part is awaited."""
        return self._reservations.outstanding

    @property
    def load(self) -> WorkerLoad:
        """The engine's, with what is reserved and what is in quarantine."""
        load = self.engine.load
        reserved = self._reservations.count(State.RESERVED, State.FILLING)
        return msgspec.structs.replace(
            load, waiting=load.waiting + reserved, quarantined_blocks=self._reservations.quarantined_blocks
        )

    def report(
        self, load: WorkerLoad, activity: Activity, events: tuple[DecodeEvent, ...], kv: tuple[KvChange, ...]
    ) -> DecodeReport:
        """This round's message."""
        ignored = Counter({cause.value: number for cause, number in self._reservations.ignored.items()})
        new, self._ignored = ignored - self._ignored, ignored
        ended = Counter(self._reservations.ended_in)
        over, self._ended = ended - self._ended, ended
        states = {state.value: self._reservations.count(state) for state in State if state is not State.ENDED}
        return DecodeReport(
            load=load,
            activity=activity,
            reservations=states,
            ignored=dict(new),
            ended=tuple((state.value, cause.value, number) for (state, cause), number in over.items()),
            events=events,
            kv=kv,
        )

    # Commands

    def handle(self, command: DecodeCommand) -> None:
        """Carries out a command of the front."""
        match command:
            case Reserve():
                self._reserve(command)
            case ClaimWrite():
                self._claim(command)
            case GiveUpAttempt():
                target = Target.LOCAL if command.local else Target.REMOTE
                self._feed(Retarget(command.reservation_id, command.attempt, target), call_id=command.call_id)
            case EndRequest():
                self._feed(Cancel(command.reservation_id, EndCause(command.cause)))
            case EndChoice():
                self._choices.end_choice(command)
            case WriterStopped():
                # What it sent may lie in buffers still: the blocks are free when the transport has drained them.
                self.agent.drain(WriterTerminal(command.reservation_id, command.attempt, command.writer))
            case WriterDead():
                self.agent.drain(WriterProvenDead(command.writer))

    def _reserve(self, command: Reserve) -> None:
        reservation = command.reservation_id
        sampling = command.sampling
        root = None if sampling.prompt_logprobs is not None else root_hash(salt=command.cache_salt)
        request = LiveRequest(command.prompt, sampling, command.priority, root)
        request.choices = [Choice() for _ in range(sampling.n)]
        try:
            # The front has checked the ids; this loop is everybody's.
            check_lengths(len(command.prompt), max_tokens=command.sampling.max_tokens, limits=self.engine.limits)
            if len(self._requests) >= self._capacity:
                raise Overloaded(f"{len(self._requests)} requests are in hand, the limit", retry_after_s=0.5)
            if command.local and not self._may_prefill:
                raise _no_prefill_here()
            blocks = self._reserve_blocks(request)
            if blocks is None:
                raise self._full(request)
            try:
                if command.local:
                    actions = self._reservations.create_local(reservation, blocks)
                else:
                    self._reservations.create(reservation, blocks, time.monotonic())
                    actions = []
            except PacelineError:
                request.joined(blocks, filled=False).release()
                raise
        except PacelineError as error:
            over = Over(reservation_id=reservation, finish=FinishReason.ERROR, failure=Failure.of(error))
            self.events.append(over)
            return
        self._requests[reservation] = request
        self.events.append(Reserved(reservation_id=reservation))
        self._carry_out(actions)

    def _claim(self, command: ClaimWrite) -> None:
        try:
            self._fingerprint.check(command.fingerprint)
        except PacelineError as error:
            self.events.append(CallRefused(call_id=command.call_id, failure=Failure.of(error)))
            return
        self._feed(Claim(command.reservation_id, command.attempt, command.writer), call_id=command.call_id)

    def _reserve_blocks(self, request: LiveRequest) -> BlockLease | None:
        """The blocks that are to be filled: what is cached of the prompt stays apart, for a writer must never have it.

        A writer that is given up holds its blocks in quarantine, and others read the cached ones.
        """
        reserved = self.engine.try_reserve_target(request.prompt, request.stored_tokens, root=request.root)
        if reserved is None:
            return None
        request.lease, missing = reserved
        request.held_blocks, request.missing_blocks = request.lease.shared, len(missing)
        return missing

    def _reserve_again(self, reservation: ReservationId) -> BlockLease | None:
        """For another attempt."""
        request = self._requests[reservation]
        return self.engine.try_target(len(request.prompt), request.held_blocks)

    def _full(self, request: LiveRequest) -> Overloaded:
        load = self.load
        needed = blocks_to_admit(len(request.prompt), request.sampling.max_tokens, self.engine.limits.most_blocks)
        return Overloaded(
            f"{needed} KV blocks are needed to begin with, and a new request may have {load.headroom_blocks} of "
            f"{load.total_blocks} now",
            retry_after_s=0.5,
        )

    # Progress

    def transferred(self, events: AgentEvents) -> None:
        """Takes in the parts that landed, and the ends of writers."""
        for part in events.parts:
            self._landed(part)
        for ended in events.drained:
            assert isinstance(ended, WriterTerminal | WriterProvenDead), "only the ends of writers are drained"
            self._feed(ended)

    def stepped(self, output: StepOutput) -> None:
        """Tells the reservations how far their requests have come, and passes on what the choices say."""
        for done in output.progress:
            # Whose sibling has failed in this very step is gone.
            if (reservation := self._choices.owner(done.request_id)) is not None:
                self._advance(reservation, self._requests[reservation], done)
                self._choices.progressed(done)
        # They lost their blocks behind the step that is told of, if they were in it.
        for request_id in output.preempted:
            reservation = self._choices.owner(request_id)
            record = None if reservation is None else self._reservations.get(reservation)
            if record is not None and record.state is not State.LOCAL:  # computed here before, and so again
                self._feed(Preempted(record.id))

    def expire(self, now: float) -> None:
        """The reservations' timers."""
        self._carry_out(self._reservations.expire(now))

    def next_deadline(self) -> float | None:
        """The reservations' next timer."""
        return self._reservations.next_deadline()

    def _landed(self, part: PartNotification) -> None:
        request = self._requests.get(part.reservation_id)
        if request is not None:
            now = time.monotonic()
            request.first_part_at = request.first_part_at or now
            request.landed_at = now
        self._feed(
            Part(
                part.reservation_id,
                part.attempt,
                part.writer,
                part.part,
                last=part.last,
                num_blocks=part.num_blocks,
                first_tokens=part.first_tokens,
                first_logprobs=part.first_logprobs,
            )
        )

    def _advance(self, reservation: ReservationId, request: LiveRequest, done: Progress) -> None:
        record = self._reservations.get(reservation)
        assert record is not None, "the engine runs live requests only"
        if record.state is State.LANDED:
            self._feed(StepTaken(reservation))
        elif record.state is State.LOCAL:
            if request.local:
                computed = min(done.computed, len(request.prompt)) - request.cached_tokens
                # After a preemption it is computed again, which is not told again.
                request.prompt_tokens_computed = max(request.prompt_tokens_computed, computed)
            if done.computed >= len(request.prompt):
                self._feed(PromptComputed(reservation))

    def _tell_front(self, event: DecodeEvent) -> None:
        self.events.append(event)  # the list is another one after each report

    # Actions

    def _feed(self, event: Event, *, call_id: int | None = None) -> None:
        self._carry_out(self._reservations.handle(event, time.monotonic()), call_id)

    def _carry_out(self, actions: list[Action[BlockLease]], call_id: int | None = None) -> None:
        for action in actions:
            match action:
                case Grant():
                    assert call_id is not None, "a grant answers a claim"
                    self._grant(action, call_id)
                case Refuse(error=error):
                    assert call_id is not None, "a refusal answers a call"
                    self.events.append(CallRefused(call_id=call_id, failure=Failure.of(error)))
                case NewTarget():
                    self._redirect(action, call_id)
                case Land():
                    self._land(action)
                case StartLocalPrefill():
                    self._prefill_here(action)
                case AbortWriter():
                    self.events.append(
                        StopWriter(reservation_id=action.reservation, attempt=action.attempt, writer=action.writer)
                    )
                case End():
                    self._end(action)
                case Alarm():
                    self.events.append(
                        QuarantineAlarm(
                            reservation_id=action.reservation,
                            attempt=action.attempt,
                            writer=action.writer,
                            num_blocks=action.num_blocks,
                            age_s=action.age_s,
                        )
                    )
                case DrainAndRestart():
                    self.events.append(
                        MustRestart(quarantined_blocks=action.quarantined_blocks, pool_blocks=action.pool_blocks)
                    )

    def _grant(self, grant: Grant[BlockLease], call_id: int) -> None:
        self.events.append(
            WriteGranted(
                call_id=call_id,
                blocks=grant.blocks.blocks,
                held_tokens=self._requests[grant.reservation].held_blocks * BLOCK_TOKENS,
                agent=self.agent.metadata(),
            )
        )

    def _redirect(self, new: NewTarget, call_id: int | None) -> None:
        request = self._requests.get(new.reservation)
        if request is None:  # it was to be computed here, may not be, and has ended
            if call_id is not None:
                self.events.append(CallRefused(call_id=call_id, failure=Failure.of(_no_prefill_here())))
            return
        request.attempts = max(request.attempts, new.attempt)
        request.first_part_at = None  # of the attempt that was given up
        self.events.append(
            Redirected(
                reservation_id=new.reservation,
                call_id=call_id,
                attempt=new.attempt if new.target is Target.REMOTE else None,
                cause=new.cause.value,
            )
        )

    def _land(self, land: Land[BlockLease]) -> None:
        request = self._requests[land.reservation]
        request.parts_landed, request.blocks_landed = land.landed_parts, land.landed_blocks
        if land.landed_blocks != request.missing_blocks:
            # What is missing would be read as other requests' old KV.
            error = TransferFailed(
                f"{land.landed_blocks} blocks landed for a prompt of {len(request.prompt)} tokens, of which "
                f"{request.missing_blocks} were missing here"
            )
            self._reject(land.reservation, land.blocks, error)
            return
        lease = request.joined(land.blocks, filled=True)
        try:
            self._choices.landed(land.reservation, lease, land.first_tokens, land.first_logprobs)
        except EngineError as error:
            # The prefill worker sent what cannot be: no first token, say, or one that ends the request.
            self._reject(land.reservation, lease, error)

    def _prefill_here(self, start: StartLocalPrefill[BlockLease]) -> None:
        if not self._may_prefill:
            self._reject(start.reservation, start.blocks, _no_prefill_here())
            return
        request = self._requests[start.reservation]
        request.local = True
        lease = request.joined(start.blocks, filled=False)
        if request.shares_prompt and not self.engine.try_stock(lease, len(request.prompt)):
            self._reject(start.reservation, lease, self._full(request))
            return
        self._choices.compute(start.reservation, lease)

    def _reject(self, reservation: ReservationId, blocks: BlockLease, error: PacelineError) -> None:
        blocks.release()
        self._requests[reservation].error = error
        self._feed(Cancel(reservation))

    def _end(self, end: End) -> None:
        request = self._requests.pop(end.reservation)
        self._choices.abort(request)
        if request.lease is not None:
            request.lease.release()
        error = request.error or end.error
        seconds = 0.0
        if request.first_part_at is not None and request.landed_at is not None:
            seconds = request.landed_at - request.first_part_at
        self.events.append(
            Over(
                reservation_id=end.reservation,
                finish=request.finish or FinishReason.CANCELLED,
                failure=None if error is None else Failure.of(error),
                completion_tokens=request.told,
                prompt_tokens_computed=request.prompt_tokens_computed,
                cached_tokens=request.cached_tokens,
                attempts=request.attempts,
                blocks_landed=request.blocks_landed,
                bytes_landed=request.blocks_landed * self._block_bytes,
                parts_landed=request.parts_landed,
                landing_seconds=seconds,
            )
        )


def _no_prefill_here() -> NoWorker:
    return NoWorker("a prefill worker is needed for every prompt, since local_prefill is never")


if __name__ == "__main__":
    main("decode-engine", DecodeConfig, COMMANDS, DecodeLoop)
