"""The workers that the router believes in: their leases, epochs and loads, and the work it has given them.

Pure: every method that needs the time is passed it, in seconds of one monotonic clock. Placement sees `views`, which
add what the router has handed out to what a worker last reported, since a report may be a heart-beat old.

A worker is placeable while its lease is alive, its engine goes round, it does not drain, and it is neither suspect nor
resting: suspect until its next sign of life after a call to it failed, resting for a while after it refused for want of
room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from paceline.errors import StaleEpoch, UnknownWorker
from paceline.services.router.balance import Pace
from paceline.services.router.placement import WorkerView
from paceline.types import Limits, Role, WorkerKey, WorkerLoad

STALLED_S: Final = 5.0
"""An engine whose loop has not come round for so long gets nothing new: its front goes on beating with the last load of
an idle engine. Long against a step, and short against the wait of whoever would be sent there."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself when it registers, validated."""

    key: WorkerKey
    role: Role
    address: str  # host:port
    model: str
    limits: Limits
    fingerprint: bytes  # canonical bytes of the message; compared, never read
    eos_token_ids: tuple[int, ...] = ()
    lock_id: str = ""
    claim_token: bytes = b""  # a secret between the workers: in answers to them, and nowhere else

    def __repr__(self) -> str:
        return f"WorkerInfo({self.role.value} worker {self.key} at {self.address})"


class Registered:
    """A worker as the router sees it."""

    def __init__(self, info: WorkerInfo, load: WorkerLoad, *, draining: bool, stalled_s: float, now: float) -> None:
        self.info = info
        self.load = load
        self.draining = draining
        self.last_seen = now
        self.loaded_at = now  # when `load` came
        self.pace = Pace(load.work)
        self._stalled_s = stalled_s
        self.suspect = False
        self.rests_until = -math.inf
        self.claims: set[Claim] = set()
        self.unfit: frozenset[WorkerKey] = frozenset()  # decode workers that this prefill worker cannot write to

    def credit(self, blocks: int) -> None:
        """Takes blocks off the last reported load."""
        committed = max(0, self.load.committed_blocks - blocks)
        self.load = msgspec.structs.replace(self.load, committed_blocks=committed)

    def stalled(self, *, now: float) -> bool:
        """True where the engine's loop, by the last report and that report's age, has not come round for too long."""
        return self.load.tick_age_ms / 1e3 + now - self.loaded_at >= self._stalled_s

    def view(self, *, now: float) -> WorkerView:
        """What placement may know of it."""
        unseen = [claim for claim in self.claims if not claim.seen] if self.claims else ()
        return WorkerView(
            key=self.info.key,
            role=self.info.role,
            fingerprint=self.info.fingerprint,
            limits=self.info.limits,
            alive=not (self.draining or self.suspect or self.stalled(now=now)),
            rests=now < self.rests_until,
            requests=self.load.running + self.load.waiting + len(unseen),
            pending_tokens=self.load.pending_prompt_tokens + sum([claim.tokens for claim in unseen]),
            headroom_blocks=max(0, self.load.headroom_blocks - sum([claim.blocks for claim in unseen])),
            claims=len(self.claims),
            unfit=self.unfit,
        )


class Claim:
    """Work that the router has given to a worker: a handle, released once.

    It adds to the worker's load until it is `seen`: until a report of the worker can be taken to include it.
    """

    def __init__(self, worker: Registered, *, tokens: int, blocks: int) -> None:
        self.worker = worker
        self.tokens = tokens
        self.blocks = blocks
        self.seen = False
        worker.claims.add(self)

    @property
    def key(self) -> WorkerKey:
        """The worker's."""
        return self.worker.info.key

    @property
    def released(self) -> bool:
        """True after `release`."""
        return self not in self.worker.claims

    def release(self, *, reported: bool = False) -> None:
        """Gives the work back. `reported`: the worker's last load shows that it has ended.

        Where it does not, the blocks are taken off that load: the worker frees them about now, and the next report,
        a heart-beat away, puts a wrong guess right. A second release is a defect of the caller.
        """
        assert not self.released, f"a claim on {self.key} was released twice"
        self.worker.claims.discard(self)
        if self.seen and not reported:
            self.worker.credit(self.blocks)


class Registry:
    """Live workers by id. `lease_s` is how long one is believed in without a sign of life, in seconds.

    `stalled_s` is how old the last tick of an engine may be; it has to be over the time between two heart-beats.
    """

    def __init__(self, *, lease_s: float, stalled_s: float = STALLED_S) -> None:
        self._lease_s = lease_s
        self._stalled_s = stalled_s
        self._workers: dict[str, Registered] = {}
        self._lapsed: dict[str, Registered] = {}  # their lease ended with work in their hands

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._workers.values()))

    def get(self, key: WorkerKey) -> Registered | None:
        """The worker under exactly this epoch, or None."""
        worker = self._workers.get(key.worker_id)
        return worker if worker is not None and worker.info.key == key else None

    def register(self, info: WorkerInfo, load: WorkerLoad, *, draining: bool = False, now: float) -> WorkerInfo | None:
        """Takes a worker in and returns the earlier life that it replaces, if there was one.

        The same epoch again is a new snapshot of the same life: what was given to it stays, even over the end of its
        lease. Raises StaleEpoch where a later epoch is known.
        """
        known = self._workers.get(info.key.worker_id) or self._lapsed.get(info.key.worker_id)
        if known is not None:
            self._reject_earlier(info.key, known)
            self._lapsed.pop(info.key.worker_id, None)
            if known.info == info:
                self._workers[info.key.worker_id] = known
                self._refresh(known, load, draining=draining, now=now)
                return None
        self._workers[info.key.worker_id] = Registered(
            info, load, draining=draining, stalled_s=self._stalled_s, now=now
        )
        return known.info if known is not None else None

    def heartbeat(self, key: WorkerKey, load: WorkerLoad, *, draining: bool, now: float) -> Registered:
        """Renews a lease. Raises UnknownWorker for a worker, or an epoch, that did not register; StaleEpoch."""
        known = self._workers.get(key.worker_id)
        if known is None:
            raise UnknownWorker(f"worker {key} is not registered here")
        self._reject_earlier(key, known)
        if known.info.key != key:
            raise UnknownWorker(f"worker {key} is not registered here under that epoch; {known.info.key} is")
        self._refresh(known, load, draining=draining, now=now)
        return known

    def report(self, key: WorkerKey, load: WorkerLoad, *, now: float) -> None:
        """Takes the load that a reply carried. It renews no lease: that is the heart-beat's part."""
        worker = self.get(key)
        if worker is not None:
            self._take(worker, load, now=now)

    def suspect(self, key: WorkerKey) -> None:
        """Gives a worker nothing new until its next heart-beat: a call to it failed."""
        worker = self.get(key)
        if worker is not None:
            worker.suspect = True

    def drains(self, key: WorkerKey) -> None:
        """Notes that a worker refused because it drains, ahead of the heart-beat that says so."""
        worker = self.get(key)
        if worker is not None:
            worker.draining = True

    def rest(self, key: WorkerKey, *, until: float) -> None:
        """Gives a worker that refused for want of room nothing new until a moment, or its next report."""
        worker = self.get(key)
        if worker is not None:
            worker.rests_until = until

    def unfit(self, prefill: WorkerKey, decode: WorkerKey) -> None:
        """Notes that one cannot write to the other: their pools differ, or the way between them is too slow."""
        worker = self.get(prefill)
        if worker is not None:
            worker.unfit |= {decode}

    def expire(self, *, now: float) -> list[WorkerInfo]:
        """Drops the workers whose lease has ended, and returns them. What they have in hand goes on: see `let_go`."""
        gone = [worker for worker in self if worker.last_seen + self._lease_s <= now]
        for worker in gone:
            del self._workers[worker.info.key.worker_id]
            self._lapsed[worker.info.key.worker_id] = worker
        return [worker.info for worker in gone]

    def let_go(self, key: WorkerKey) -> bool:
        """True, once, where a worker's lease has ended and nothing is in its hands any more."""
        worker = self._lapsed.get(key.worker_id)
        if worker is None or worker.info.key != key or worker.claims:
            return False
        del self._lapsed[key.worker_id]
        return True

    def next_expiry(self) -> float | None:
        """When the next lease ends, if nothing is heard until then."""
        return min((worker.last_seen + self._lease_s for worker in self), default=None)

    def views(self, *, now: float) -> list[WorkerView]:
        """Every worker, as placement sees it."""
        return [worker.view(now=now) for worker in self._workers.values()]

    def peers(self, role: Role) -> list[WorkerInfo]:
        """The live workers of the other tier than `role`; draining ones too, which finish what they have."""
        return [worker.info for worker in self if worker.info.role is not role]

    def _reject_earlier(self, key: WorkerKey, known: Registered) -> None:
        if key.epoch < known.info.key.epoch:
            raise StaleEpoch(f"worker {key} is an earlier life of {known.info.key}, which is registered here")

    def _refresh(self, worker: Registered, load: WorkerLoad, *, draining: bool, now: float) -> None:
        worker.last_seen = now
        worker.draining = draining
        worker.suspect = False
        self._take(worker, load, now=now)

    def _take(self, worker: Registered, load: WorkerLoad, *, now: float) -> None:
        worker.load = load
        worker.loaded_at = now
        worker.pace.take(load.work, now=now)
        worker.rests_until = -math.inf
        if worker.info.role is Role.PREFILL:
            # A prefill worker acknowledges nothing before its reply. Whatever was sent before this report arrived is
            # taken to be in it: wrong by a round trip at most, and only towards trying a worker that then refuses.
            for claim in worker.claims:
                claim.seen = True
