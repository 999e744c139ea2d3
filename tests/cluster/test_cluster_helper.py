"""The cluster that other tests stand on: what it promises is true of real processes."""

from __future__ import annotations

import signal

import pytest

from paceline.cli.child import group_members
from paceline.errors import ConfigError
from paceline.testing.cluster import Cluster, ClusterFailed

pytestmark = pytest.mark.cluster


def test_a_request_is_served_by_both_workers_and_leaves_nothing_behind() -> None:
    with Cluster.start(prefill=1, decode=1) as cluster, cluster.client() as client:
        processes = cluster.processes
        answer = client.complete([1, 2, 3] * 20, max_tokens=4, temperature=0, ignore_eos=True)
        cluster.wait_idle()
    assert len(answer.token_ids) == 4
    assert answer.finish.prefill_worker is not None
    assert answer.finish.decode_worker is not None
    assert answer.finish.prompt_tokens_computed_on_decode == 0
    assert {name: len(pids) for name, pids in processes.items()} == {"router": 1, "prefill-0": 2, "decode-0": 2}
    assert not any(group_members(pids[0]) for pids in processes.values())


def test_killed_parts_come_back_and_serve() -> None:
    with Cluster.start(prefill=1, decode=1) as cluster:
        for role, part in (("decode", "engine"), ("prefill", "front"), ("router", "front")):
            before = cluster.processes
            name = role if role == "router" else f"{role}-0"
            cluster.kill(role, 0, "engine" if part == "engine" else "front")
            assert not any(group_members(pid) for pid in before[name])
            cluster.wait_ready()
            assert cluster.processes[name] != before[name]
        with cluster.client() as client:
            assert client.complete([1, 2, 3], max_tokens=2, ignore_eos=True).finish.usage.completion_tokens == 2
        cluster.wait_idle()


def test_a_role_that_does_not_exit_cleanly_fails_the_stop() -> None:
    cluster = Cluster.start(prefill=0, decode=1, grace_s=0.0)
    pid = cluster.kill("decode", 0, "front", signal.SIGSTOP)
    with pytest.raises(ClusterFailed, match=r"did not exit with 0: \{'decode-0': -9\}"):
        cluster.stop()
    assert group_members(pid) == []


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(ClusterFailed, match=r"decode-0 cannot start \(exit status 2\)(.|\n)*/no/such/folder"):
        Cluster.start(per_role={"decode-0": {"model": "/no/such/folder"}})


def test_a_setting_that_no_role_has_is_refused() -> None:
    with pytest.raises(TypeError, match="warmth"):
        Cluster.start(warmth=3)
    with pytest.raises(ConfigError, match="pool_blocks"):
        Cluster.start(pool_blocks=0)
