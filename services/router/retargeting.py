"""A leg's requests to its decode worker to give an attempt up, after a prefill worker failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from paceline.errors import PacelineError
from paceline.services.router.events import RetargetFailed
from paceline.services.router.fleet import Fleet
from paceline.services.router.placement import LocalPrefill
from paceline.services.router.prefilling import Prefilling
from paceline.services.router.registry import Claim
from paceline.services.router.words import Job, RetargetOutcome


class Retargeting:
    """None is made before the worker has reserved: it knows of no attempt until then."""

    def __init__(
        self,
        job: Job,
        decode: Claim,
        prefilling: Prefilling,
        *,
        fleet: Fleet,
        take: Callable[[RetargetOutcome | RetargetFailed], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`take` hears the answers, and `start` runs a call as a task."""
        self._job = job
        self._decode = decode
        self._prefilling = prefilling
        self._fleet = fleet
        self._take = take
        self._start = start
        self._reserved = False
        self._owed: PacelineError | None = None  # a failure that waits for `reserved`

    def reserved(self) -> None:
        """The worker has reserved: asks what had to wait for that. Raises as `after` does."""
        self._reserved = True
        if self._owed is not None:
            error, self._owed = self._owed, None
            self.after(error)

    def after(self, error: PacelineError) -> None:
        """Asks for another prefill worker once, then for the decode worker itself. Raises `error` where neither may."""
        if not self._reserved:
            self._owed = error
            return
        free = self._prefilling.attempt == 1 and self._prefilling.has_another()
        if not free and self._fleet.policy.local_prefill is LocalPrefill.NEVER and not self._prefilling.replied:
            raise error  # after a reply the decode worker is to say first that it has not landed
        self._start(self._call(self._prefilling.attempt, local=not free))

    def to_local(self) -> None:
        """Asks the decode worker to compute the prompt itself."""
        self._start(self._call(self._prefilling.attempt, local=True))

    async def _call(self, attempt: int, *, local: bool) -> None:
        try:
            client = self._fleet.client(self._decode)
            outcome = await client.retarget(self._job.reservation_id, attempt=attempt, local=local)
        except PacelineError as error:
            self._take(RetargetFailed(error))
        else:
            self._take(outcome)
