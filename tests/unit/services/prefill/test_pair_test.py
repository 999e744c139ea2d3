"""When the way between two workers counts as too slow: not after one busy moment."""

from __future__ import annotations

import msgspec
import pytest

from paceline.config import PrefillConfig
from paceline.errors import SlowTransport, TransferFailed
from paceline.kvtransfer.layout import Fingerprint
from paceline.services.prefill import pair_test
from paceline.services.prefill.pair_test import PairTests
from paceline.services.worker.messages import Ready
from paceline.services.worker.peers import PeerChannels
from paceline.services.worker.registration import PeerInfo
from paceline.types import Limits, WorkerKey

PEER = PeerInfo(WorkerKey("decode-0", 1), "127.0.0.1:1")
FINGERPRINT = Fingerprint(
    format_version=1, model="m", weights_digest="d", dtype="float32", layers=1, kv_heads=1, head_dim=1, block_tokens=16
)


class Known:
    """A registration that knows the newest life of one peer."""

    newest = PEER.key

    def knows(self, key: WorkerKey) -> bool:
        return key == self.newest


class Worker:
    """What a pair test needs of a front."""

    config = PrefillConfig(transport_floor_mb_s=100.0)
    key = WorkerKey("prefill-0", 1)
    ready = Ready(
        limits=Limits(vocab_size=1, context_tokens=1, pool_blocks=64),
        fingerprint=FINGERPRINT,
        eos_token_ids=(),
        transport="loopback",
    )
    claim_token = b""

    def __init__(self) -> None:
        self.registration = Known()

    def send(self, command: msgspec.Struct) -> None:
        raise AssertionError(f"nothing is measured here, and {command} was sent")


class Scripted(PairTests):
    """Finds these speeds, in bytes a second; None is a try that fails."""

    def __init__(self, *speeds: float | None) -> None:
        super().__init__(Worker(), PeerChannels())
        self.left = list(speeds)

    async def _measure(self, peer: PeerInfo, number: int) -> float:
        speed = self.left.pop(0)
        if speed is None:
            raise TransferFailed("no room")
        return speed


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr(pair_test.asyncio, "sleep", at_once)


async def test_a_fast_pair_is_measured_once_and_serves() -> None:
    tests = Scripted(2e9, 1.0)
    await tests.run(PEER)
    tests.check(PEER.key)
    assert tests.left == [1.0]


async def test_a_busy_moment_does_not_make_a_pair_slow() -> None:
    tests = Scripted(20e6, None, 3e6, 2e9, 1.0)
    await tests.run(PEER)
    tests.check(PEER.key)
    assert tests.left == [1.0]


async def test_a_pair_that_is_slow_each_time_refuses_with_its_best_and_the_floor() -> None:
    tests = Scripted(20e6, 40e6, 30e6, 10e6, 5e6)
    await tests.run(PEER)
    with pytest.raises(SlowTransport, match=r"at 40\.0 MB/s, under the floor of 100 MB/s"):
        tests.check(PEER.key)


async def test_a_pair_that_is_not_measured_yet_is_given_the_benefit_of_the_doubt() -> None:
    Scripted().check(PEER.key)


async def test_a_life_that_is_over_is_not_measured() -> None:
    tests = Scripted(2e9)
    tests._worker.registration.newest = WorkerKey("decode-0", 2)
    await tests.run(PEER)
    assert tests.left == [2e9]
