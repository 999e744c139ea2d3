"""The prefix cache through real processes: hits in the usage, events on both workers, and room made by preemption."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from paceline.prefix import block_hashes, root_hash
from paceline.protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from paceline.testing.cluster import Cluster
from paceline.types import Role

pytestmark = pytest.mark.cluster

PROMPT = [7 * i % 500 + 3 for i in range(100)]


def test_hits_are_told_and_events_follow_them() -> None:
    with Cluster.start() as cluster, cluster.client() as client:
        [prefill] = client.loads().of(Role.PREFILL)
        [decode] = client.loads().of(Role.DECODE)
        first = client.complete(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
        second = client.complete(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
        cluster.wait_idle()
        with grpc.insecure_channel(prefill.address) as channel:
            stub: Any = prefill_pb2_grpc.PrefillStub(channel)
            on_prefill = snapshot(stub.SubscribeKvEvents(prefill_pb2.PrefillSubscribeKvEventsRequest()))
        with grpc.insecure_channel(decode.address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            on_decode = snapshot(stub.SubscribeKvEvents(decode_pb2.DecodeSubscribeKvEventsRequest()))
        assert (on_prefill[0], on_decode[0]) == (prefill.key.epoch, decode.key.epoch)
    assert first.token_ids == second.token_ids
    assert (first.finish.usage.cached_tokens, second.finish.usage.cached_tokens) == (0, 96)
    assert (first.finish.transfer.held_blocks, second.finish.transfer.held_blocks) == (0, 6)
    assert (first.finish.transfer.blocks, second.finish.transfer.blocks) == (7, 1)
    assert set(block_hashes(PROMPT)) <= on_prefill[1]
    assert set(block_hashes([*PROMPT, *first.token_ids[:-1]])) <= on_decode[1]
    assert not on_decode[1] & set(block_hashes(PROMPT, root_hash(salt="another")))


def snapshot(call: Any) -> tuple[int, set[bytes]]:
    """The worker's epoch, and what it holds: all requests are over, so there are no changes after it."""
    first = next(call)
    assert first.event.HasField("cleared")
    held: set[bytes] = set()
    while len(held) < 6:
        held |= set(next(call).event.stored.hashes)
    call.cancel()
    return first.epoch, held


def test_a_small_pool_serves_answers_that_do_not_fit_it_together() -> None:
    prompts = [[i, *PROMPT[:30]] for i in range(6)]
    sampling: dict[str, Any] = {"max_tokens": 150, "temperature": 1.1, "seed": 7, "ignore_eos": True}
    with Cluster.start(pool_blocks=26) as cluster, cluster.client() as client:
        alone = [client.complete(prompt, **sampling).token_ids for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(lambda prompt: client.complete(prompt, **sampling), prompts))
        cluster.wait_idle()
    assert [answer.token_ids for answer in together] == alone
    assert {answer.finish.usage.completion_tokens for answer in together} == {150}
