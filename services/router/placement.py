"""Where a request goes: a pure function of what it asks for and what the workers look like.

A decode worker needs room for the prompt and the beginning of the answer, as it admits by itself. A prefill worker is
paired only with a decode worker of the same fingerprint. The prompt is computed on the decode worker itself where that
is the policy, where the prompt is short, or where no matching prefill worker is alive; where such are alive and merely
busy, the request waits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from paceline.types import Limits, Role, WorkerKey, blocks_in_groups, blocks_to_admit, longest_request


class LocalPrefill(enum.Enum):
    """Whether decode workers compute prompts."""

    AUTO = "auto"  # where no prefill worker can, or the prompt is short
    ALWAYS = "always"
    NEVER = "never"


class LocalReason(enum.Enum):
    """Why a prompt is computed on the decode worker."""

    POLICY = "policy"
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL_WORKER = "no_prefill_worker"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The router's settings that bear on placement."""

    local_prefill: LocalPrefill = LocalPrefill.AUTO
    local_prefill_below: int = 0  # prompts of fewer tokens stay on the decode worker
    prefill_slots: int = 8  # requests in one prefill worker's hands at most


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs, in tokens."""

    prompt_tokens: int
    max_tokens: int

    def blocks(self, limits: Limits) -> int:
        """Blocks by which a decode worker of these limits admits it."""
        return blocks_to_admit(self.prompt_tokens, self.max_tokens, limits.most_blocks)

    def fits(self, limits: Limits) -> bool:
        """Whether a decode worker of these limits can ever serve it."""
        return self.prompt_tokens + self.max_tokens <= longest_request(limits)

    def prompt_blocks(self, limits: Limits) -> int:
        """Blocks on a prefill worker of these limits, until they are handed over."""
        return blocks_in_groups(self.prompt_tokens, limits.most_blocks)


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as placement sees it. What the router handed out since the last report is included."""

    key: WorkerKey
    role: Role
    fingerprint: bytes
    limits: Limits
    alive: bool = True  # neither draining, stalled nor suspect
    rests: bool = False  # alive, and refused a moment ago
    requests: int = 0
    pending_tokens: int = 0  # prompt tokens accepted and not computed
    headroom_blocks: int = 0
    claims: int = 0  # requests of this router in its hands
    unfit: frozenset[WorkerKey] = frozenset()  # decode workers that a prefill worker turned out unable to write to


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes. Without `prefill` the decode worker computes the prompt, for `local_reason`."""

    decode: WorkerKey
    prefill: WorkerKey | None = None
    local_reason: LocalReason | None = None


class Placement(Protocol):
    """Decides where requests go. Pure and quick: it runs on the event loop for each request."""

    def __call__(self, ask: Ask, workers: Sequence[WorkerView], policy: Policy) -> Choice | None:
        """A choice, or None where the request has to wait."""


def least_loaded(ask: Ask, workers: Sequence[WorkerView], policy: Policy) -> Choice | None:
    """The free prefill worker with the fewest pending prompt tokens, with its emptiest decode worker."""
    decodes = sorted(
        (
            worker
            for worker in workers
            if _takes(worker, Role.DECODE)
            and worker.headroom_blocks >= ask.blocks(worker.limits)
            and ask.fits(worker.limits)
        ),
        key=lambda worker: (-worker.headroom_blocks, worker.requests, worker.key),
    )
    if not decodes:
        return None
    if policy.local_prefill is LocalPrefill.ALWAYS:
        return Choice(decode=decodes[0].key, local_reason=LocalReason.POLICY)
    if policy.local_prefill is LocalPrefill.AUTO and ask.prompt_tokens < policy.local_prefill_below:
        return Choice(decode=decodes[0].key, local_reason=LocalReason.SHORT_PROMPT)
    able = [worker for worker in workers if _able(worker, ask) and any(_pair(worker, decode) for decode in decodes)]
    best = _idlest(able, ask, policy)
    if best is not None:
        return Choice(decode=next(decode.key for decode in decodes if _pair(best, decode)), prefill=best.key)
    orphans = [decode for decode in decodes if not any(_pair(worker, decode) for worker in able)]
    if orphans and policy.local_prefill is LocalPrefill.AUTO:
        return Choice(decode=orphans[0].key, local_reason=LocalReason.NO_PREFILL_WORKER)
    return None


def obstacle(workers: Iterable[WorkerView], policy: Policy) -> str | None:
    """Why no request at all could be placed, in words; None where one could, though it may have to wait for room."""
    decode_is_enough = policy.local_prefill is not LocalPrefill.NEVER
    known = []
    for worker in workers:
        if decode_is_enough and worker.role is Role.DECODE and worker.alive:
            return None  # with the first: this is asked at every heart-beat
        known.append(worker)
    decodes = [worker for worker in known if worker.role is Role.DECODE and worker.alive]
    if not decodes:
        return _none_of(Role.DECODE, known)
    prefills = [worker for worker in known if worker.role is Role.PREFILL and worker.alive]
    if not prefills:
        return f"{_none_of(Role.PREFILL, known)}, and local_prefill is never"
    if not any(_pair(prefill, decode) for prefill in prefills for decode in decodes):
        return "no prefill worker can be paired with a decode worker, and local_prefill is never"
    return None


def _none_of(role: Role, workers: Iterable[WorkerView]) -> str:
    registered = sum(worker.role is role for worker in workers)
    if not registered:
        return f"no {role.value} worker is registered"
    return f"no {role.value} worker takes work: {registered} registered, which drain, stand still or did not answer"


def another_prefill(
    ask: Ask, workers: Sequence[WorkerView], policy: Policy, *, decode: WorkerView, exclude: Iterable[WorkerKey]
) -> WorkerKey | None:
    """The prefill worker to take a prompt over for `decode`, or None where none is free."""
    excluded = frozenset(exclude)
    able = [worker for worker in workers if _able(worker, ask) and _pair(worker, decode) and worker.key not in excluded]
    best = _idlest(able, ask, policy)
    return None if best is None else best.key


def _takes(worker: WorkerView, role: Role) -> bool:
    return worker.role is role and worker.alive and not worker.rests


def _pair(prefill: WorkerView, decode: WorkerView) -> bool:
    return prefill.fingerprint == decode.fingerprint and decode.key not in prefill.unfit


def _able(worker: WorkerView, ask: Ask) -> bool:
    """Alive, and large enough for the prompt; it may be busy."""
    return (
        worker.role is Role.PREFILL
        and worker.alive
        and ask.prompt_blocks(worker.limits) <= worker.limits.pool_blocks
        and ask.prompt_tokens < worker.limits.context_tokens  # the answer's first token is in the context too
    )


def _idlest(able: Sequence[WorkerView], ask: Ask, policy: Policy) -> WorkerView | None:
    free = (
        worker
        for worker in able
        if not worker.rests
        and worker.claims < policy.prefill_slots
        and worker.headroom_blocks >= ask.prompt_blocks(worker.limits)
    )
    return min(free, key=lambda worker: (worker.pending_tokens, worker.claims, worker.key), default=None)
