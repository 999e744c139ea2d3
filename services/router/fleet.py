"""The live workers in action: the registry on a clock, a client for each worker, and claims on them.

Whatever may make room calls `on_room`: the head of the queue is tried again. Whatever may give a first request a
place, or take the last one's, calls `on_change`: `obstacle` is to be looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import msgspec

from paceline.errors import Draining, EngineLost, Overloaded, PacelineError, WorkerLost
from paceline.log import get_logger
from paceline.metrics import RouterMetrics
from paceline.services.router.balance import Balance, MeanRequest, balance
from paceline.services.router.calls import WorkerClient
from paceline.services.router.deaths import Deaths, OnDeath, Watch
from paceline.services.router.placement import (
    Ask,
    Choice,
    LocalReason,
    Placement,
    Policy,
    another_prefill,
    least_loaded,
    obstacle,
)
from paceline.services.router.registry import STALLED_S, Claim, Registered, Registry, WorkerInfo
from paceline.types import Limits, Role, Usage, WorkerKey, WorkerLoad, longest_request

_log = get_logger(__name__)

_LONGEST_REST_S: Final = 5.0


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A place: claims on a decode worker and, unless the prompt stays there for `local_reason`, on a prefill worker."""

    decode: Claim
    prefill: Claim | None
    local_reason: LocalReason | None


class Fleet:
    """The workers of one router. `close` it once; `watch` runs beside it for as long as it lives."""

    def __init__(
        self,
        *,
        lease_s: float,
        stalled_s: float = STALLED_S,
        policy: Policy,
        metrics: RouterMetrics,
        placement: Placement = least_loaded,
    ) -> None:
        self.registry = Registry(lease_s=lease_s, stalled_s=stalled_s)
        self.policy = policy
        self.on_room: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self._lease_s = lease_s
        self._metrics = metrics
        self._placement = placement
        self._mean_request = MeanRequest()
        self._clients: dict[WorkerKey, WorkerClient] = {}
        self._deaths = Deaths()
        self._vigils: dict[WorkerKey, asyncio.Task[None]] = {}  # over the connections to prefill workers
        self._chores: set[asyncio.Task[None]] = set()

    # ---- the workers come and go -------------------------------------------------------------------------------------

    def register(self, info: WorkerInfo, load: WorkerLoad, *, draining: bool = False) -> None:
        """Takes a worker in. Raises StaleEpoch."""
        replaced = self.registry.register(info, load, draining=draining, now=self.now)
        if replaced is not None:
            _log.info("worker replaced", worker=str(replaced.key), by=str(info.key))
            self._forget(replaced.key)
        if info.key not in self._clients:
            client = self._clients[info.key] = WorkerClient(info)
            if info.role is Role.PREFILL:
                self._vigils[info.key] = asyncio.get_running_loop().create_task(self._keep_vigil(client))
            _log.info("worker registered", worker=str(info.key), role=info.role.value, address=info.address)
        self._count()
        self.on_room()
        self.on_change()

    def heartbeat(self, key: WorkerKey, load: WorkerLoad, *, draining: bool) -> Registered:
        """Renews a lease. Raises UnknownWorker or StaleEpoch."""
        worker = self.registry.heartbeat(key, load, draining=draining, now=self.now)
        self.on_room()
        self.on_change()
        return worker

    async def watch(self) -> None:
        """Drops workers whose lease ends, until cancelled.

        They get nothing new. Their calls in flight go on where they still answer: it may be this process that did not
        hear.
        """
        while True:
            expiry = self.registry.next_expiry()
            await asyncio.sleep(self._lease_s if expiry is None else max(0.0, expiry - self.now) + 0.001)
            gone = self.registry.expire(now=self.now)
            for info in gone:
                _log.warning("worker's lease ended", worker=str(info.key), lease_s=self._lease_s)
                self.spawn(self._look_after(info))
            if gone:
                self._count()
                self.on_room()  # a prompt whose prefill workers are gone may go to a decode worker now
                self.on_change()

    async def close(self) -> None:
        """Closes every channel and waits for what runs in the background."""
        for vigil in self._vigils.values():
            vigil.cancel()
        await asyncio.gather(*self._vigils.values(), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        await asyncio.gather(*self._chores, return_exceptions=True)

    # ---- a request takes and gives back ------------------------------------------------------------------------------

    def place(self, ask: Ask) -> Placed | None:
        """Claims a place for a request, or None where it has to wait."""
        choice = self._placement(ask, self.registry.views(now=self.now), self.policy)
        return None if choice is None else self._claim(choice, ask)

    def claim_prefill(self, ask: Ask, decode: Registered, *, exclude: Iterable[WorkerKey]) -> Claim | None:
        """Claims a prefill worker that can take a prompt over for `decode`, or None."""
        key = self._another_prefill(ask, decode, exclude)
        worker = None if key is None else self.registry.get(key)
        return None if worker is None else _claim_prompt(worker, ask)

    def has_prefill(self, ask: Ask, decode: Registered, *, exclude: Iterable[WorkerKey]) -> bool:
        """True where `claim_prefill` would find one now."""
        return self._another_prefill(ask, decode, exclude) is not None

    def release(self, claim: Claim, *, reported: bool = False) -> None:
        """Gives a claim back. `reported`: the worker's last load shows that the work has ended."""
        claim.release(reported=reported)
        self._let_go(claim.key)
        self.on_room()

    def give_back(self, placed: Placed) -> None:
        """Gives a place back that nobody took up."""
        for claim in (placed.decode, placed.prefill):
            if claim is not None:
                claim.release()
                self._let_go(claim.key)
        self.on_room()

    def report(self, key: WorkerKey, load: WorkerLoad | None) -> None:
        """Takes the load that a reply carried."""
        if load is not None:
            self.registry.report(key, load, now=self.now)
            self.on_room()

    def failed(self, key: WorkerKey, error: PacelineError) -> None:
        """Keeps new work from a worker after a call to it failed: until its next sign of life, or for a rest."""
        match error:
            case Overloaded():
                self.registry.rest(key, until=self.now + min(error.retry_after_s, _LONGEST_REST_S))
            case Draining():
                self.registry.drains(key)
            case EngineLost():  # its front's own word
                self._lost(key, error)
            case _:
                self.registry.suspect(key)
        self.on_change()

    def on_death(self, claim: Claim, tell: OnDeath) -> Watch:
        """Watches over a claimed prefill worker: `tell` is called, once, where it is lost before the watch ends.

        That is so when its front says that its engine is gone, when its connection breaks or its lease ends and it
        does not answer, and when a later life replaces it.
        """
        return self._deaths.watch(claim.key, tell)

    def end_watch(self, watch: Watch) -> None:
        """Ends it: all has landed, or the attempt is given up."""
        self._deaths.end(watch)
        self._let_go(watch.key)

    def unfit(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """Never pairs two workers again in these lives of theirs."""
        _log.error("workers cannot be paired", prefill=str(prefill), decode=str(decode))
        self.registry.unfit(prefill, decode)
        self.on_change()

    # ---- what is known of them ---------------------------------------------------------------------------------------

    @property
    def hand_offs_watched(self) -> int:
        """Attempts whose prefill worker is watched over: all may not have landed yet."""
        return len(self._deaths)

    @property
    def now(self) -> float:
        """The loop's clock, in seconds."""
        return asyncio.get_running_loop().time()

    def client(self, claim: Claim) -> WorkerClient:
        """The client of a claimed worker. Raises WorkerLost where the worker is gone."""
        client = self._clients.get(claim.key)
        if client is None:
            raise WorkerLost(f"{claim.worker.info.role.value} worker {claim.key} is gone")
        return client

    def limits(self, own: Limits) -> Limits:
        """The limits that are enforced: those of the live decode worker that takes the longest request, within `own`.

        A smaller one beside it gets what fits it: one that was started with too little must not shut everybody out.
        """
        decodes = [worker.info.limits for worker in self.registry if worker.info.role is Role.DECODE]
        # By what is served of either: a long context helps nothing where the pool is small.
        roomiest = max(decodes, key=lambda limits: (longest_request(limits), limits.pool_blocks), default=own)
        return Limits(
            vocab_size=min(limits.vocab_size for limits in (own, *decodes)),
            context_tokens=min(own.context_tokens, roomiest.context_tokens),
            pool_blocks=roomiest.pool_blocks,
            most_blocks=roomiest.most_blocks,
        )

    @property
    def obstacle(self) -> str | None:
        """Why no request at all could be placed now, in words; None where one could."""
        now = self.now
        return obstacle((worker.view(now=now) for worker in self.registry), self.policy)

    def spawn(self, chore: Coroutine[Any, Any, None]) -> None:
        """Runs something short in the background; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def served(self, usage: Usage) -> None:
        """Takes note of what a request that ended well was."""
        self._mean_request.take(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
            now=self.now,
        )

    @property
    def balance(self) -> Balance | None:
        """How many workers of each tier suit the requests of late, as far as that can be told."""
        workers = ((worker.info.role, worker.info.limits, worker.pace) for worker in self.registry)
        return balance(self._mean_request, workers)

    def count_fallback(self, reason: str) -> None:
        """Counts a prompt that is computed elsewhere than planned or preferred."""
        self._metrics.fallbacks.labels(reason).inc()

    def _another_prefill(self, ask: Ask, decode: Registered, exclude: Iterable[WorkerKey]) -> WorkerKey | None:
        views = self.registry.views(now=self.now)
        return another_prefill(ask, views, self.policy, decode=decode.view(now=self.now), exclude=exclude)

    def _claim(self, choice: Choice, ask: Ask) -> Placed:
        decode = self.registry.get(choice.decode)
        prefill = None if choice.prefill is None else self.registry.get(choice.prefill)
        assert decode is not None, f"placement chose {choice.decode}, which is not registered"
        return Placed(
            decode=Claim(decode, tokens=ask.prompt_tokens, blocks=ask.blocks(decode.info.limits)),
            prefill=None if prefill is None else _claim_prompt(prefill, ask),
            local_reason=choice.local_reason,
        )

    async def _keep_vigil(self, client: WorkerClient) -> None:
        """The end of a process ends its connections, which tells at once what no call may be there to tell."""
        while True:
            await client.lost()
            key = client.info.key
            self._lost(key, WorkerLost(f"prefill worker {key} is lost: its connection broke, and it does not answer"))

    async def _look_after(self, info: WorkerInfo) -> None:
        """Its lease has ended: asks it once more before what it has in hand goes elsewhere."""
        client = self._clients.get(info.key)
        if client is not None and not await client.answers():
            self._lost(info.key, WorkerLost(f"{info.role.value} worker {info.key} is lost: its lease ended"))
        self._let_go(info.key)

    def _lost(self, key: WorkerKey, error: PacelineError) -> None:
        self.registry.suspect(key)
        self.on_change()
        if told := self._deaths.tell(key, error):
            _log.warning("hand-offs lost their worker", worker=str(key), hand_offs=told, reason=error.message)

    def _let_go(self, key: WorkerKey) -> None:
        """Forgets a worker whose lease has ended, once it has nothing of ours in its hands."""
        if key not in self._deaths and self.registry.let_go(key):
            self._forget(key)

    def _forget(self, key: WorkerKey) -> None:
        client, vigil = self._clients.pop(key, None), self._vigils.pop(key, None)
        if vigil is not None:
            vigil.cancel()
        # Nobody would tell of it later.
        self._deaths.tell(key, WorkerLost(f"worker {key} is gone"))
        if client is not None:
            self.spawn(client.close())

    def _count(self) -> None:
        for role in Role:
            live = sum(worker.info.role is role for worker in self.registry)
            self._metrics.workers.labels(role.value).set(live)


def _claim_prompt(worker: Registered, ask: Ask) -> Claim:
    return Claim(worker, tokens=ask.prompt_tokens, blocks=ask.prompt_blocks(worker.info.limits))
