"""Engines that stand still, as SIGSTOP makes them: their fronts hold them for lost and kill them, and not too early."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.client import Client, Completion, worker_load
from paceline.errors import WorkerLost
from paceline.testing.cluster import Cluster
from paceline.testing.scrape import wait_for

pytestmark = pytest.mark.cluster

PROMPT = [7 * place % 500 + 3 for place in range(1_800)]
STALL_S = 4.0
READY_S = 60.0
DEADLINE_S = 600.0  # of requests, so that none is ended by it


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    patient = {"silence_timeout_s": DEADLINE_S, "claim_timeout_s": DEADLINE_S}  # so that no timer helps
    with Cluster.start(
        1,
        2,
        pool_blocks=512,
        prefix_cache=False,
        max_batch_tokens=16,
        engine_stall_s=STALL_S,
        per_role={"decode": patient},
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.wait_ready(READY_S)
    running.wait_idle()
    return running


def complete(client: Client, prompt: list[int] = PROMPT, max_tokens: int = 16) -> Completion:
    return client.complete(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=DEADLINE_S)


def stop_engine_at_work(cluster: Cluster, pids: dict[str, tuple[int, ...]], role: str) -> str:
    """Stops the engine of a worker that has work, and returns the worker's id."""
    found: list[str] = []

    def look() -> bool:
        for worker in cluster.loads().workers:
            if worker.role.value == role and worker_load(worker.address, worker.role).committed_blocks:
                found.append(worker.key.worker_id)
        return bool(found)

    wait_for(look, f"work on a {role} worker")
    os.kill(pids[found[0]][1], signal.SIGSTOP)
    return found[0]


def test_a_stream_whose_decode_engine_stands_still_ends_and_the_worker_comes_back(cluster: Cluster) -> None:
    pids = cluster.processes
    with cluster.client() as client:
        stream = client.generate([3] * 40, max_tokens=1_500, temperature=0.0, ignore_eos=True, timeout=DEADLINE_S)
        seen = [token for _ in range(5) for token in next(stream).token_ids]
        stopped = stop_engine_at_work(cluster, pids, "decode")
        with pytest.raises(WorkerLost, match=f"{stopped}@.* no sign of life"):
            for chunk in stream:
                seen += chunk.token_ids
        cluster.wait_ready(READY_S)
        clean = complete(client, [3] * 40, 1_500).token_ids
    assert tuple(seen) == clean[: len(seen)]
    cluster.wait_idle()


def test_a_search_whose_decode_engine_stands_still_is_done_by_another(cluster: Cluster) -> None:
    def search(client: Client) -> Completion:
        return client.complete(PROMPT[:200], max_tokens=300, beam_width=4, n=4, ignore_eos=True, timeout=DEADLINE_S)

    pids = cluster.processes
    with cluster.client() as client, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(search, client)
        stopped = stop_engine_at_work(cluster, pids, "decode")
        finish = answer.result().finish
    assert finish.decode_worker is not None
    assert finish.decode_worker.worker_id != stopped
    cluster.wait_ready(READY_S)
    cluster.wait_idle()


def test_a_prompt_whose_prefill_engine_stands_still_is_computed_elsewhere_and_every_block_comes_back(
    cluster: Cluster,
) -> None:
    """What it was granted is free once it is reaped: an engine that is only stopped could be resumed, and write."""
    pids = cluster.processes
    with cluster.client() as client:
        expected = complete(client).token_ids
        with ThreadPoolExecutor(1) as beside:
            answer = beside.submit(complete, client)
            stop_engine_at_work(cluster, pids, "prefill")
            assert answer.result().token_ids == expected
    cluster.wait_ready(READY_S)
    cluster.wait_idle()


def test_an_engine_that_stands_still_for_a_moment_goes_on_with_what_it_had(cluster: Cluster) -> None:
    pids = cluster.processes
    engines = [pids[worker.key.worker_id][1] for worker in cluster.loads().workers]
    with cluster.client() as client:
        expected = complete(client).token_ids
        with ThreadPoolExecutor(1) as beside:
            answer = beside.submit(complete, client)
            for pid in engines:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(STALL_S / 4)
            for pid in engines:
                os.kill(pid, signal.SIGCONT)
            assert answer.result().token_ids == expected
    assert cluster.processes == pids


def test_workers_that_stand_still_as_a_whole_are_not_lost(cluster: Cluster) -> None:
    """As when a container is paused for long: no front has waited for its engine."""
    pids = cluster.processes
    both = [pid for worker in cluster.loads().workers for pid in pids[worker.key.worker_id]]
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2 * STALL_S)
    finally:
        for pid in reversed(both):  # the engines last: their fronts have time to be hasty
            os.kill(pid, signal.SIGCONT)
    cluster.wait_ready(READY_S)
    time.sleep(STALL_S)
    assert cluster.processes == pids
    with cluster.client() as client:
        assert len(complete(client).token_ids) == 16
