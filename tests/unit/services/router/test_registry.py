"""The registry of live workers, in virtual time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import StaleEpoch, UnknownWorker
from paceline.services.router.registry import STALLED_S, Claim, Registered, Registry, WorkerInfo
from paceline.types import Limits, Role, WorkerKey, WorkerLoad

LEASE_S = 5.0


def info(worker_id: str = "d0", *, epoch: int = 1, role: Role = Role.DECODE, address: str = "host:1") -> WorkerInfo:
    return WorkerInfo(
        key=WorkerKey(worker_id, epoch),
        role=role,
        address=address,
        model="m",
        limits=Limits(vocab_size=512, context_tokens=2_048, pool_blocks=100),
        fingerprint=b"f",
    )


def load(*, committed: int = 0, pending: int = 0) -> WorkerLoad:
    return WorkerLoad(total_blocks=100, committed_blocks=committed, pending_prompt_tokens=pending)


def registered(registry: Registry, key: WorkerKey) -> Registered:
    worker = registry.get(key)
    assert worker is not None
    return worker


def test_a_worker_is_known_under_exactly_its_epoch() -> None:
    registry = Registry(lease_s=LEASE_S)
    assert registry.register(info(epoch=3), load(), now=0.0) is None
    assert registry.get(WorkerKey("d0", 3)) is not None
    assert registry.get(WorkerKey("d0", 2)) is None
    assert registry.get(WorkerKey("d1", 3)) is None


def test_a_newer_epoch_replaces_the_older_and_an_older_one_is_refused() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(epoch=3), load(), now=0.0)
    assert registry.register(info(epoch=4), load(), now=0.0) == info(epoch=3)
    assert [worker.info.key.epoch for worker in registry] == [4]
    with pytest.raises(StaleEpoch, match="d0@3 is an earlier life of d0@4"):
        registry.register(info(epoch=3), load(), now=0.0)
    with pytest.raises(StaleEpoch):
        registry.heartbeat(WorkerKey("d0", 3), load(), draining=False, now=0.0)


def test_a_heartbeat_of_a_worker_that_did_not_register_asks_it_to() -> None:
    registry = Registry(lease_s=LEASE_S)
    with pytest.raises(UnknownWorker):
        registry.heartbeat(WorkerKey("d0", 1), load(), draining=False, now=0.0)
    registry.register(info(epoch=1), load(), now=0.0)
    with pytest.raises(UnknownWorker, match="d0@1 is"):
        registry.heartbeat(WorkerKey("d0", 2), load(), draining=False, now=0.0)


def test_registering_the_same_life_again_keeps_what_it_was_given() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    claim = Claim(registered(registry, info().key), tokens=10, blocks=4)
    assert registry.register(info(), load(committed=1), now=1.0) is None
    [view] = registry.views(now=1.0)
    assert (view.claims, view.headroom_blocks) == (1, 95)
    claim.release()


def test_a_worker_whose_engine_does_not_tick_is_not_alive_however_its_front_beats() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    hung = msgspec.structs.replace(load(), tick_age_ms=STALLED_S * 1e3 - 500)
    registry.heartbeat(info().key, hung, draining=False, now=1.0)
    assert [registry.views(now=now)[0].alive for now in (1.0, 1.25, 1.5)] == [True, True, False]
    registry.report(info().key, load(), now=2.0)
    assert registry.views(now=2.0)[0].alive


def test_a_worker_whose_lease_ends_keeps_its_work_and_gets_it_back() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    claim = Claim(registered(registry, info().key), tokens=10, blocks=4)
    assert registry.expire(now=LEASE_S) == [info()]
    assert registry.views(now=LEASE_S) == []
    assert not registry.let_go(info().key)
    assert registry.register(info(), load(), now=6.0) is None
    assert registry.views(now=6.0)[0].claims == 1
    registry.expire(now=20.0)
    claim.release()
    assert registry.let_go(info().key)
    assert not registry.let_go(info().key)


def test_a_newer_epoch_replaces_a_life_whose_lease_has_ended() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(epoch=2), load(), now=0.0)
    registry.expire(now=LEASE_S)
    with pytest.raises(StaleEpoch):
        registry.register(info(epoch=1), load(), now=6.0)
    assert registry.register(info(epoch=3), load(), now=6.0) == info(epoch=2)


EXACT_SECONDS = st.integers(1, 640).map(lambda ticks: ticks / 64)


@given(beats=st.lists(EXACT_SECONDS, max_size=20))
def test_a_lease_lasts_exactly_its_length_past_the_last_sign_of_life(beats: list[float]) -> None:
    registry, now = Registry(lease_s=LEASE_S), 0.0
    registry.register(info(), load(), now=now)
    for pause in beats:
        now += pause
        gone = registry.expire(now=now)
        assert gone == ([info()] if pause >= LEASE_S else [])
        if gone:
            registry.register(info(), load(), now=now)
        else:
            registry.heartbeat(info().key, load(), draining=False, now=now)
        assert registry.next_expiry() == now + LEASE_S
    assert registry.expire(now=now + LEASE_S) == [info()]
    assert registry.next_expiry() is None


def test_a_reply_renews_no_lease() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    registry.report(info().key, load(committed=7), now=0.0)
    assert registered(registry, info().key).load.committed_blocks == 7
    assert registry.expire(now=LEASE_S) == [info()]


def test_what_a_decode_worker_has_not_answered_yet_counts_against_its_headroom() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(committed=20), now=0.0)
    claim = Claim(registered(registry, info().key), tokens=50, blocks=30)
    [view] = registry.views(now=0.0)
    assert (view.headroom_blocks, view.requests) == (50, 1)
    registry.report(info().key, load(committed=20), now=0.0)  # of before the request came
    [view] = registry.views(now=0.0)
    assert view.headroom_blocks == 50
    claim.seen = True
    registry.report(info().key, load(committed=50), now=0.0)
    [view] = registry.views(now=0.0)
    assert view.headroom_blocks == 50
    claim.release()
    [view] = registry.views(now=0.0)
    assert view.headroom_blocks == 80  # ahead of the report that will say so


def test_a_claim_whose_end_was_reported_is_credited_once() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(committed=50), now=0.0)
    claim = Claim(registered(registry, info().key), tokens=50, blocks=30)
    claim.seen = True
    registry.report(info().key, load(committed=20), now=0.0)
    claim.release(reported=True)
    [view] = registry.views(now=0.0)
    assert view.headroom_blocks == 80


def test_a_prefill_workers_report_takes_in_what_was_sent_before_it() -> None:
    registry = Registry(lease_s=LEASE_S)
    prefill = info("p0", role=Role.PREFILL)
    registry.register(prefill, load(pending=100), now=0.0)
    Claim(registered(registry, prefill.key), tokens=10, blocks=1)
    [view] = registry.views(now=0.0)
    assert (view.pending_tokens, view.headroom_blocks, view.claims) == (110, 99, 1)
    registry.report(prefill.key, load(pending=60), now=0.0)
    [view] = registry.views(now=0.0)
    assert (view.pending_tokens, view.headroom_blocks, view.claims) == (60, 100, 1)  # the slot stays taken


def test_a_claim_is_released_once() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    claim = Claim(registered(registry, info().key), tokens=1, blocks=1)
    claim.release()
    with pytest.raises(AssertionError, match="released twice"):
        claim.release()


def test_a_claim_outlives_its_worker_without_harm() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(epoch=1), load(), now=0.0)
    claim = Claim(registered(registry, info(epoch=1).key), tokens=1, blocks=40)
    claim.seen = True
    registry.register(info(epoch=2), load(committed=50), now=0.0)
    claim.release()
    [view] = registry.views(now=0.0)
    assert (view.claims, view.headroom_blocks) == (0, 50)


def test_a_suspect_is_not_alive_until_its_next_sign_of_life() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    registry.suspect(info().key)
    registry.report(info().key, load(), now=0.0)
    assert not registry.views(now=0.0)[0].alive
    registry.heartbeat(info().key, load(), draining=False, now=1.0)
    assert registry.views(now=1.0)[0].alive


def test_a_draining_worker_is_not_alive_and_still_a_peer() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    registry.heartbeat(info().key, load(), draining=True, now=1.0)
    assert not registry.views(now=1.0)[0].alive
    assert registry.peers(Role.PREFILL) == [info()]
    assert registry.peers(Role.DECODE) == []


def test_a_rest_ends_in_time_or_with_a_report() -> None:
    registry = Registry(lease_s=LEASE_S)
    registry.register(info(), load(), now=0.0)
    registry.rest(info().key, until=2.0)
    assert registry.views(now=1.9)[0].rests and registry.views(now=1.9)[0].alive
    assert not registry.views(now=2.0)[0].rests
    registry.rest(info().key, until=9.0)
    registry.report(info().key, load(), now=0.0)
    assert not registry.views(now=2.0)[0].rests


def test_news_of_unknown_workers_is_ignored() -> None:
    registry = Registry(lease_s=LEASE_S)
    gone = WorkerKey("d9", 1)
    registry.report(gone, load(), now=0.0)
    registry.suspect(gone)
    registry.drains(gone)
    registry.unfit(gone, gone)
    registry.rest(gone, until=1.0)
    assert list(registry) == []
