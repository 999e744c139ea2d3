"""Real processes on GPUs: what is handed over gives the tokens that one worker gives alone, whatever carries it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.client import Client, Completion
from paceline.testing.cluster import Cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]

LAST = max(torch.cuda.device_count() - 1, 0)
SETTINGS: dict[str, Any] = {
    "model": "dummy:smollm2-135m",
    "dtype": "float32",
    "context_tokens": 4096,
    "pool_blocks": 2048,
    "memory_fraction": 0.4,
    "prefill_devices": ("cuda:0",),
    "decode_devices": (f"cuda:{LAST}",),
    "prefix_cache": False,
    "transport_floor_mb_s": 1.0,
}
PROMPTS = [random.Random(length).choices(range(49_152), k=length) for length in (1, 15, 16, 17, 300, 1024, 1500, 2500)]


def answers(client: Client) -> list[Completion]:
    """Of all prompts at once, greedy and drawn."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}]
    asked = [(prompt, way) for prompt in PROMPTS for way in ways]
    with ThreadPoolExecutor(len(asked)) as pool:
        calls = [pool.submit(client.complete, prompt, max_tokens=24, ignore_eos=True, **way) for prompt, way in asked]
        return [call.result() for call in calls]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with Cluster.start(0, 1, local_prefill="always", **SETTINGS) as cluster, cluster.client() as client:
        return [answer.token_ids for answer in answers(client)]


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_tokens_after_a_hand_over_are_those_of_one_worker(transport: str, alone: list[tuple[int, ...]]) -> None:
    with Cluster.start(1, 1, local_prefill="never", transport=transport, **SETTINGS) as cluster:
        with cluster.client() as client:
            found = answers(client)
        cluster.wait_idle()
    assert [answer.token_ids for answer in found] == alone
    assert all(answer.finish.transfer.blocks > 0 for answer in found)


def test_what_the_prefill_worker_has_cached_goes_with_what_it_computes(alone: list[tuple[int, ...]]) -> None:
    with Cluster.start(
        1, 1, local_prefill="never", per_role={"prefill": {"prefix_cache": True}}, **SETTINGS
    ) as cluster:
        with cluster.client() as client:
            rounds = [answers(client) for _ in range(3)]
        cluster.wait_idle()
    for found in rounds:
        assert [answer.token_ids for answer in found] == alone
        assert all(answer.finish.transfer.held_blocks == 0 for answer in found)
    for found in rounds[1:]:  # the one uncached block is in flight long before a claim comes for the cached ones
        cached = {answer.finish.usage.prompt_tokens: answer.finish.usage.cached_tokens for answer in found}
        assert cached == {len(prompt): (len(prompt) - 1) // 16 * 16 for prompt in PROMPTS}


def test_log_probabilities_and_penalties_are_served_beside_plain_requests() -> None:
    with Cluster.start(1, 1, **SETTINGS) as cluster, cluster.client() as client, ThreadPoolExecutor(4) as pool:
        plain = pool.submit(client.complete, PROMPTS[4], max_tokens=64, temperature=0, ignore_eos=True)
        scored = client.complete(PROMPTS[3], max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)
        shaped = client.complete(PROMPTS[3], max_tokens=8, temperature=0, ignore_eos=True, repetition_penalty=1.5)
        many = client.complete(PROMPTS[3], max_tokens=8, temperature=1.0, seed=3, ignore_eos=True, n=3)
        again = client.complete(PROMPTS[4], max_tokens=64, temperature=0, ignore_eos=True)
        assert plain.result().token_ids == again.token_ids
        assert [len(each) for each in (scored.token_ids, shaped.token_ids)] == [8, 8]
        assert len(many.choices) == 3
        cluster.wait_idle()
