"""One leg of a request: one try on one decode worker, with the prefill workers that feed it.

Both calls start at once, under one reservation id; the prefill worker's first, for the first token waits for it alone.
`_handle` answers what they say, one event after another, as soon as it is read:

    decode   reserved          the room is there; a re-target that had to wait for it is asked now
             tokens            on to the client, each index once, whoever said it first
             retargeted        it gave the attempt up itself: a prefill worker gets the next one, or it computes alone
             finish            the end
             fails             before its `reserved`, or anything is sent: again elsewhere; later: the client is told
    prefill  replies           its tokens go on at once: the first token never waits for the decode worker
             is lost           after its reply too, until the decode worker's first token says that all has landed
             fails             the decode worker is asked to re-target, to another prefill worker once, else to itself
    retarget attempt/local/already landed

What the decode worker says comes over its token stream or the request's own call (`token_stream`), some of it twice;
`prefilling` and `retargeting` act on what is heard.

However a leg ends, both calls are cancelled and both claims given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from paceline.errors import (
    AlreadyLanded,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    PacelineError,
    RequestCancelled,
    UnknownReservation,
    WorkerLost,
    WrongAttempt,
)
from paceline.log import get_logger
from paceline.services.router.calls import DecodeStream
from paceline.services.router.choices import Heard
from paceline.services.router.events import (
    LOST,
    UNFIT,
    Again,
    DecodeFailed,
    Ended,
    Event,
    PrefillFailed,
    PrefillReplied,
    Record,
    RetargetFailed,
    WriterLost,
)
from paceline.services.router.fleet import Fleet, Placed
from paceline.services.router.placement import Ask
from paceline.services.router.prefilling import Prefilling
from paceline.services.router.registry import Claim
from paceline.services.router.retargeting import Retargeting
from paceline.services.router.words import (
    ChoiceFinished,
    DecodeFinished,
    Job,
    NewTokens,
    Reserved,
    Retargeted,
    RetargetOutcome,
    first_words,
)
from paceline.types import FinishReason

_log = get_logger(__name__)

_REPLY_S: Final = 0.25
"""Bound on the wait for a prefill worker's reply after the answer's end."""
_RESERVE_S: Final = 15.0
"""Bound on the wait for `reserved`, which a decode worker says or refuses between two steps of its engine."""
_EARLY_S: Final = 0.1
"""A worker's clock may have the request's deadline so much earlier than the router's."""


class Leg:
    """One try. `deliver` passes tokens and ends of choices on, and says what became of the choice."""

    def __init__(
        self,
        job: Job,
        ask: Ask,
        placed: Placed,
        *,
        fleet: Fleet,
        record: Record,
        deliver: Callable[[NewTokens | ChoiceFinished], Heard],
        delivered: Callable[[], bool],
    ) -> None:
        """`delivered` is true once something of the answer was sent to the client."""
        self._job = job
        self._fleet = fleet
        self._record = record
        self._deliver = deliver
        self._delivered = delivered
        self._end: asyncio.Future[Ended | Again] = asyncio.get_running_loop().create_future()
        self._late: list[Event] = []  # what came after the end
        self._tasks: set[asyncio.Task[None]] = set()
        self._decode = placed.decode
        self._stream: DecodeStream | None = None
        self._local = placed.prefill is None
        self._reserved = False
        self._settled = False  # the decode worker's last report shows the request's end
        self._prefilling = Prefilling(
            job, ask, placed.prefill, placed.decode, fleet=fleet, record=record, take=self._take, start=self._start
        )
        self._retargeting = Retargeting(
            job, placed.decode, self._prefilling, fleet=fleet, take=self._take, start=self._start
        )
        self._deadline = fleet.now + job.timeout_s
        self._patience: asyncio.TimerHandle | None = None  # with a decode worker that has not said `reserved`

    async def run(self) -> Ended | Again:
        """Goes the leg. Raises the PacelineError that the client is to see."""
        try:
            self._record.decode_worker = self._decode.key
            local = self._local
            if not local:
                self._prefilling.begin()
            self._start(self._listen(local=local))
            self._patience = asyncio.get_running_loop().call_later(_RESERVE_S, self._give_decode_up)
            end = await self._end
            await self._hear_prefill_out()
            return end
        finally:
            await self._stop()

    async def abort_decode(self, choice: int | None = None) -> None:
        """Tells the decode worker that the answer, or one choice, is complete. Best effort: nobody listens any more."""
        try:
            await self._fleet.client(self._decode).abort_decode(self._job.reservation_id, choice)
        except PacelineError as error:
            _log.debug("abort not delivered", worker=str(self._decode.key), reason=error.reason)

    # ---- events ------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        """Handles an event, unless the leg has ended."""
        if self._end.done():
            self._late.append(event)
            return
        try:
            end = self._handle(event)
        except PacelineError as error:
            self._end.set_exception(error)
        except Exception as defect:  # noqa: BLE001 - it ends this leg alone: who tells it of events has others to tell
            _log.error("a leg broke", exc_info=defect)
            self._end.set_exception(EngineError(f"the relay broke: {type(defect).__name__}"))
        else:
            if end is not None:
                self._end.set_result(end)

    def _handle(self, event: Event) -> Ended | Again | None:
        match event:
            case NewTokens() | ChoiceFinished():
                self._prefilling.end_watch()
                return self._on_said(event)
            case Reserved():
                self._on_reserved(event)
            case Retargeted():
                self._on_retargeted(event)
            case DecodeFinished():
                self._settled = event.load is not None
                self._fleet.report(self._decode.key, event.load)
                return Ended(reason=event.reason, decode=event)
            case DecodeFailed():
                return self._on_decode_failed(event.error)
            case PrefillReplied():
                return self._on_prefill_replied(event)
            case PrefillFailed():
                return self._on_prefill_failed(event)
            case WriterLost():
                return self._on_writer_lost(event)
            case RetargetOutcome():
                self._on_retarget_outcome(event)
            case RetargetFailed():
                return self._on_retarget_failed(event.error)
        return None

    def _on_said(self, said: NewTokens | ChoiceFinished) -> Ended | None:
        heard = self._deliver(said)
        if heard is Heard.STOPPED:
            self._fleet.spawn(self.abort_decode(said.choice))
        # A choice that the worker ended is followed by its last word; one that a stop string ended is not.
        if heard is not Heard.OVER or isinstance(said, ChoiceFinished):
            return None
        self._fleet.spawn(self.abort_decode())
        return Ended(reason=FinishReason.STOP)

    def _on_reserved(self, event: Reserved) -> None:
        if self._reserved:
            return  # it goes on over another call, from the first word on
        self._reserved = True
        self._end_patience()
        self._decode.seen = True
        self._record.reserved_at = self._fleet.now
        self._fleet.report(self._decode.key, event.load)
        self._retargeting.reserved()

    def _on_retargeted(self, event: Retargeted) -> None:
        if event.attempt is None:
            _log.warning("decode worker computes the prompt itself", worker=str(self._decode.key))
            self._prefilling.suspect(self._prefilling.claim)
            self._go_local("decode_gave_up")
        elif event.attempt > self._prefilling.attempt:
            given_up = self._prefilling.attempt
            _log.warning("decode worker gave an attempt up", worker=str(self._decode.key), attempt=given_up)
            self._next_attempt(event.attempt)

    def _on_decode_failed(self, error: PacelineError) -> Again:
        error = self._judged(error, self._decode)
        if isinstance(error, (Overloaded, *LOST)):
            self._fleet.failed(self._decode.key, error)
            # Before `reserved`, and where there is no room for the prompt, nothing but the first tokens is out, and any
            # other place says the same ones.
            if isinstance(error, Overloaded) or not (self._reserved and self._delivered()):
                return Again(error=error, refused=isinstance(error, Overloaded))
        if isinstance(error, RequestCancelled):
            raise WorkerLost(f"decode worker {self._decode.key} cancelled the request: {error.message}") from error
        if isinstance(error, LOST) and not isinstance(error, WorkerLost):
            raise WorkerLost(f"decode worker {self._decode.key} is lost: {error.message}") from error
        raise error

    def _on_prefill_replied(self, event: PrefillReplied) -> Ended | None:
        claim, reply = self._prefilling.current(event.attempt), event.reply
        if claim is None:
            return None
        self._record.note(reply)
        self._prefilling.replied = True
        self._fleet.report(claim.key, reply.load)
        self._prefilling.end()
        for said in first_words(reply, self._job.sampling):
            if (stopped := self._on_said(said)) is not None:
                return stopped
        if reply.finish is None:
            return None
        self._record.decode_worker = None
        return Ended(reason=reply.finish)

    def _on_prefill_failed(self, event: PrefillFailed) -> Again | None:
        claim = self._prefilling.current(event.attempt)
        if claim is None:
            return None
        worker, error = claim.key, self._judged(event.error, claim)
        _log.warning("prefill failed", worker=str(worker), attempt=event.attempt, reason=error.reason)
        self._prefilling.end()
        self._prefilling.end_watch()
        if isinstance(error, (InvalidRequest, DeadlineExceeded)):
            raise error
        if isinstance(error, UNFIT):
            self._fleet.unfit(worker, self._decode.key)
        elif isinstance(error, (Overloaded, *LOST)) and not isinstance(error, RequestCancelled):
            self._fleet.failed(worker, error)
        self._prefilling.failed(worker)
        if isinstance(error, Overloaded) and self._prefilling.attempt == 1 and not self._delivered():
            return Again(error=error, refused=True)
        self._retargeting.after(error)
        return None

    def _on_writer_lost(self, event: WriterLost) -> Again | None:
        """Whatever it had not sent will not come: the decode worker alone knows whether that is anything."""
        if event.attempt != self._prefilling.attempt or self._local:
            return None
        if not self._prefilling.replied:
            return self._on_prefill_failed(PrefillFailed(event.attempt, event.error))
        _log.warning("prefill worker lost after its reply", worker=str(event.worker), attempt=event.attempt)
        self._prefilling.failed(event.worker)
        self._retargeting.after(event.error)
        return None

    def _on_retarget_outcome(self, outcome: RetargetOutcome) -> None:
        self._fleet.report(self._decode.key, outcome.load)
        if outcome.attempt is not None and outcome.attempt > self._prefilling.attempt:
            self._next_attempt(outcome.attempt)
        elif outcome.local:
            self._go_local("prefill_failed")

    def _on_retarget_failed(self, error: PacelineError) -> Again | None:
        if isinstance(error, (WrongAttempt, UnknownReservation, AlreadyLanded)):
            return None  # it moved on by itself, and its stream says how
        return self._on_decode_failed(error)

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _next_attempt(self, attempt: int) -> None:
        """Hands the next attempt to another prefill worker, else to D itself; to the same one where D may not."""
        if not self._prefilling.hand_on(attempt):
            self._retargeting.to_local()

    def _judged(self, error: PacelineError, claim: Claim) -> PacelineError:
        """A time-out that is not the request's own speaks of a worker, and is none of the client's."""
        if isinstance(error, DeadlineExceeded) and self._fleet.now < self._deadline - _EARLY_S:
            return WorkerLost(f"{claim.worker.info.role.value} worker {claim.key} was too slow: {error.message}")
        return error

    def _give_decode_up(self) -> None:
        error = WorkerLost(f"decode worker {self._decode.key} neither reserved nor refused within {_RESERVE_S:g} s")
        self._take(DecodeFailed(error))

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _go_local(self, reason: str) -> None:
        """Leaves the prompt to the decode worker, which says so in its answer and on its stream, in any order."""
        if not self._local:
            self._local = True
            self._prefilling.end_watch()
            self._prefilling.end()
            self._record.prefill_worker = None
            self._fleet.count_fallback(reason)

    async def _hear_prefill_out(self) -> None:
        """A short answer may end a moment before the prefill worker's reply is here, with what it alone knows.

        The prompt's log-probabilities are waited for, to the request's own deadline: they are part of the answer.
        """
        task = self._prefilling.task
        if task is None or self._local:
            return
        scored = self._job.sampling.prompt_logprobs is not None
        await asyncio.wait({task}, timeout=None if scored else _REPLY_S)
        for event in self._late:
            if isinstance(event, PrefillReplied) and event.attempt == self._prefilling.attempt:
                self._record.note(event.reply)
                for said in first_words(event.reply, self._job.sampling):
                    self._deliver(said)

    async def _stop(self) -> None:
        self._end_patience()
        self._prefilling.end_watch()
        if self._stream is not None:
            self._stream.cancel()
        self._prefilling.end()
        for task in self._tasks:
            task.cancel()
        # Before the wait, which a second cancellation may cut short.
        self._fleet.release(self._decode, reported=self._settled)
        if self._end.done() and not self._end.cancelled():
            self._end.exception()  # nobody else looks where the request was cancelled at that moment
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the calls, each a task that ends in the inbox ---------------------------------------------------------------

    def _start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._on_call_done)
        return task

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        """A call that ends in a defect ends the leg: nothing else would ever come of it."""
        defect = None if task.cancelled() else task.exception()
        if defect is not None:
            _log.error("a call broke", exc_info=defect)
            if not self._end.done():
                self._end.set_exception(EngineError(f"a call to a worker broke: {type(defect).__name__}"))

    async def _listen(self, *, local: bool) -> None:
        try:
            self._stream = self._fleet.client(self._decode).generate(self._job, local=local, take=self._take)
        except PacelineError as error:
            self._take(DecodeFailed(error))
        else:
            await self._stream.listen()
