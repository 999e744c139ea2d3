"""A leg's dealings with prefill workers: the one that is claimed and called, and those that have failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from paceline.errors import PacelineError, WorkerLost
from paceline.services.router.calls import PrefillCall
from paceline.services.router.deaths import Watch
from paceline.services.router.events import PrefillFailed, PrefillReplied, Record, WriterLost
from paceline.services.router.fleet import Fleet
from paceline.services.router.placement import Ask, LocalPrefill
from paceline.services.router.registry import Claim
from paceline.services.router.words import Job
from paceline.types import WorkerKey


class Prefilling:
    """At most one call at a time, for the current `attempt` at the decode worker that `decode` is a claim on."""

    def __init__(
        self,
        job: Job,
        ask: Ask,
        claim: Claim | None,
        decode: Claim,
        *,
        fleet: Fleet,
        record: Record,
        take: Callable[[PrefillReplied | PrefillFailed | WriterLost], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`take` hears how calls end and that a worker is lost, and `start` runs one as a task."""
        self.attempt = 1
        self.claim = claim
        """On the worker whose call is, or is about to be, in flight."""
        self.task: asyncio.Task[None] | None = None
        """Ends once `take` knows how the call ended."""
        self.replied = False
        """The attempt's worker did: all may have landed, or its last write is under way."""
        self._job = job
        self._ask = ask
        self._decode = decode
        self._fleet = fleet
        self._record = record
        self._take = take
        self._start = start
        self._call: PrefillCall | None = None
        self._watch: Watch | None = None  # over the attempt's worker, until all has landed
        self._failed: set[WorkerKey] = set()

    def current(self, attempt: int) -> Claim | None:
        """The claim on the worker that was called for `attempt`; None where that was given up meanwhile."""
        return self.claim if attempt == self.attempt else None

    def begin(self) -> None:
        """Calls the worker that is claimed."""
        assert self.claim is not None, "a prefill worker is claimed before it is called"
        self._record.prefill_worker = self.claim.key
        self.replied = False
        self._watch = self._fleet.on_death(self.claim, partial(self._hear_of_death, self.attempt, self.claim.key))
        try:
            # Here and not in the task: so it is on its way before anything is done for the decode worker's call.
            client = self._fleet.client(self.claim)
            call = client.prefill(self._job, attempt=self.attempt, decode=self._decode.worker.info)
        except PacelineError as error:
            # Not from within the handling of another event.
            asyncio.get_running_loop().call_soon(self._take, PrefillFailed(self.attempt, error))
            return
        self._call = call
        self.task = self._start(self._hear(call, self.attempt))

    def end(self) -> None:
        """Gives the claim back, and cancels the call where that has not ended."""
        if self._call is not None:
            self._call.cancel()
        if self.task is not None:
            self.task.cancel()
        if self.claim is not None:
            self._fleet.release(self.claim)
        self.claim = self._call = self.task = None

    def end_watch(self) -> None:
        """Nothing is to be told of the attempt's worker any more: all has landed, or the attempt is given up."""
        if self._watch is not None:
            self._fleet.end_watch(self._watch)
            self._watch = None

    def failed(self, worker: WorkerKey) -> None:
        """Has a worker asked last, if at all."""
        self._failed.add(worker)

    def has_another(self) -> bool:
        """True where a worker that has not failed is free now."""
        return self._fleet.has_prefill(self._ask, self._decode.worker, exclude=self._failed)

    def hand_on(self, attempt: int) -> bool:
        """Calls another worker for the next attempt: the same one where the decode worker may not compute the prompt
        itself. False where there is none.
        """
        silent = self.claim  # or its write failed: any other one is better
        if silent is not None:
            self._failed.add(silent.key)
            self.end()
        self.end_watch()
        self.attempt = self._record.attempts = attempt
        claim = self._fleet.claim_prefill(self._ask, self._decode.worker, exclude=self._failed)
        if silent is None or self._fleet.policy.local_prefill is LocalPrefill.NEVER:
            claim = claim or self._fleet.claim_prefill(self._ask, self._decode.worker, exclude=())
        self.suspect(silent)
        if claim is None:
            return False
        self._fleet.count_fallback("another_prefill_worker")
        self.claim = claim
        self.begin()
        return True

    def suspect(self, claim: Claim | None) -> None:
        """Keeps new work from a worker that the decode worker gave up, though its call did not fail."""
        if claim is not None:
            self._fleet.failed(claim.key, WorkerLost(f"decode worker {self._decode.key} heard nothing of it"))

    def _hear_of_death(self, attempt: int, worker: WorkerKey, error: PacelineError) -> None:
        self._take(WriterLost(attempt, worker, error))

    async def _hear(self, call: PrefillCall, attempt: int) -> None:
        try:
            reply = await call.reply()
        except PacelineError as error:
            self._take(PrefillFailed(attempt, error))
        else:
            self._take(PrefillReplied(attempt, reply))
