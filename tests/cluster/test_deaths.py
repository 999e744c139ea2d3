"""Processes that die or stand still, and what becomes of the requests in their hands."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.cli.plan import free_ports
from paceline.client import Client, Completion, Health, health, worker_load
from paceline.errors import DeadlineExceeded, PacelineError, WorkerLost
from paceline.testing.cluster import Cluster
from paceline.testing.scrape import wait_for
from paceline.types import WorkerKey

pytestmark = pytest.mark.cluster

PROMPT = [7 * place % 500 + 3 for place in range(1_800)]
READY_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    ports = free_ports("127.0.0.1", len(names))  # each worker's own, which its next life takes again
    per_role: dict[str, dict[str, object]] = {name: {"port": port} for name, port in zip(names, ports, strict=True)}
    per_role["decode-0"]["engine_stall_s"] = None  # it may stand still
    with Cluster.start(2, 2, pool_blocks=512, prefix_cache=False, max_batch_tokens=16, per_role=per_role) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.wait_ready(READY_S)
    running.wait_idle()
    return running


def complete(client: Client, prompt: list[int] = PROMPT, max_tokens: int = 16) -> Completion:
    return client.complete(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=60.0)


def in_background(cluster: Cluster) -> tuple[threading.Thread, list[Completion | PacelineError]]:
    ends: list[Completion | PacelineError] = []

    def run() -> None:
        with cluster.client() as client:
            try:
                ends.append(complete(client))
            except PacelineError as error:
                ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def busy(cluster: Cluster, role: str) -> int:
    """The index of the worker of a tier that has work."""
    found: list[int] = []

    def look() -> bool:
        for worker in cluster.loads().workers:
            if worker.role.value == role:
                load = worker_load(worker.address, worker.role)
                if load.committed_blocks:
                    found.append(int(worker.key.worker_id.rpartition("-")[2]))
        return bool(found)

    wait_for(look, f"work on a {role} worker")
    return found[0]


@pytest.mark.parametrize("part", ["engine", "front"])
def test_a_prompt_whose_prefill_worker_is_killed_is_answered_all_the_same(cluster: Cluster, part: str) -> None:
    """F31: another prefill worker computes it, or the decode worker does; the tokens are those of an untouched run."""
    with cluster.client() as client:
        expected = complete(client).token_ids
    thread, ends = in_background(cluster)
    index = busy(cluster, "prefill")
    cluster.kill("prefill", index, "engine" if part == "engine" else "front")
    thread.join(READY_S)
    [end] = ends
    assert isinstance(end, Completion), end
    assert end.token_ids == expected
    cluster.wait_ready(READY_S)
    cluster.wait_idle()


def test_a_stream_whose_decode_worker_is_killed_says_so_and_frees_the_prefill_worker(cluster: Cluster) -> None:
    """F32, as far as replay is not served: one explicit error, after tokens that are right."""
    with cluster.client() as client:
        stream = client.generate([3] * 40, max_tokens=400, temperature=0.0, ignore_eos=True, timeout=60.0)
        seen = [token for _ in range(5) for token in next(stream).token_ids]
        index = busy(cluster, "decode")
        cluster.kill("decode", index, "engine")
        with pytest.raises(WorkerLost, match=f"decode-{index}@"):
            for chunk in stream:
                seen += chunk.token_ids
        cluster.wait_ready(READY_S)
        clean = complete(client, [3] * 40, 400).token_ids
    assert 0 < len(seen) < 400
    assert tuple(seen) == clean[: len(seen)]
    cluster.wait_idle()


def test_a_beam_search_whose_decode_worker_is_killed_is_done_by_another(cluster: Cluster) -> None:
    """Nothing of it was sent: the answers are those of an untouched run."""

    def search(client: Client) -> Completion:
        return client.complete(PROMPT[:200], max_tokens=300, beam_width=4, n=4, ignore_eos=True, timeout=60.0)

    with cluster.client() as client:
        expected = search(client)
    with cluster.client() as client, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(search, client)
        index = busy(cluster, "decode")
        cluster.kill("decode", index, "engine")
        found = answer.result()
    assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in expected.choices]
    assert len({choice.token_ids for choice in found.choices}) == 4
    assert found.finish.decode_worker is not None
    assert found.finish.decode_worker.worker_id == f"decode-{1 - index}"
    cluster.wait_ready(READY_S)
    cluster.wait_idle()


def test_restarted_workers_on_the_same_ports_are_shaken_hands_with_again(cluster: Cluster) -> None:
    """F33: a decode worker, then a prefill worker; every request after each is handed over, by no manual step."""
    for role in ("decode", "prefill"):
        before, name = keys(cluster), f"{role}-0"
        cluster.kill(role, 0, "front", signal.SIGTERM)
        wait_for(lambda old=before[name], name=name: keys(cluster).get(name, old) != old, "a new life", timeout=READY_S)
        cluster.wait_ready(READY_S)
        with cluster.client() as client:
            finishes = [complete(client, PROMPT[: 20 + n], 3).finish for n in range(50)]
        assert all(finish.prefill_worker is not None for finish in finishes)
        assert sum(finish.prompt_tokens_computed_on_decode for finish in finishes) == 0
        used = {finish.prefill_worker for finish in finishes} | {finish.decode_worker for finish in finishes}
        assert before[name] not in used
    cluster.wait_idle()


def test_an_engine_that_stands_still_is_unhealthy_and_serves_again_when_it_goes_on(cluster: Cluster) -> None:
    """F43 c."""
    worker = cluster.worker("decode", 0)
    pid = cluster.processes["decode-0"][1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: health(worker.address) is Health.NOT_SERVING, "the end of health", timeout=40.0, every=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: health(worker.address) is Health.SERVING, "health", every=0.1)
    with cluster.client() as client:
        assert len(complete(client).token_ids) == 16
    cluster.wait_idle()


def test_long_prompts_do_not_make_a_worker_unhealthy(cluster: Cluster) -> None:
    """F43 a: every probe is answered, and says that it serves."""
    addresses = [worker.address for worker in cluster.loads().workers]
    background = [in_background(cluster) for _ in range(8)]
    probes = 0
    while any(thread.is_alive() for thread, _ in background):
        assert all(health(address, timeout=5.0) is Health.SERVING for address in addresses)
        probes += 1
        time.sleep(0.02)
    assert probes > 3
    assert all(isinstance(end, Completion) for _, ends in background for end in ends)


def test_a_dead_engine_ends_its_front_and_only_its_own(cluster: Cluster) -> None:
    """F43 b."""
    worker = cluster.worker("prefill", 1)
    before = cluster.processes
    cluster.kill("prefill", 1, "engine")

    def dead() -> bool:
        try:
            return health(worker.address, timeout=1.0) is not Health.SERVING
        except (WorkerLost, DeadlineExceeded):
            return True

    wait_for(dead, "the end of health", timeout=5.0)
    cluster.wait_ready(READY_S)
    after = cluster.processes
    assert {name for name in before if before[name] != after[name]} == {"prefill-1"}


def keys(cluster: Cluster) -> dict[str, WorkerKey]:
    return {worker.key.worker_id: worker.key for worker in cluster.loads().workers}
