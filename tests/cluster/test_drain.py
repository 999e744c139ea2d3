"""SIGTERM while requests run, one role after the other, and long silences on a connection that pings."""

from __future__ import annotations

import os
import signal
import threading
import time

import grpc
import pytest

from paceline import wire
from paceline.cli.supervisor import Died
from paceline.client import Client, Completion
from paceline.errors import Draining, PacelineError
from paceline.protos import router_pb2
from paceline.testing.cluster import Cluster
from paceline.testing.hostile import ask
from paceline.testing.scrape import wait_for

pytestmark = pytest.mark.cluster

TOKENS = 800


class Answers:
    """Long requests under way, each on a thread."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.ends: list[Completion | PacelineError] = []
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(cluster,)) for _ in range(number)]
        for thread in self._threads:
            thread.start()
        for _ in range(number):
            assert self._begun.acquire(timeout=30.0)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60.0)

    def _run(self, cluster: Cluster) -> None:
        with cluster.client() as client:
            stream = client.generate([3] * 200, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, timeout=60.0)
            try:
                first = next(stream)
                self._begun.release()
                rest = stream.complete()
            except PacelineError as error:
                self.ends.append(error)
            else:
                self.ends.append(rest)
                assert len(first.token_ids) + len(rest.token_ids) == TOKENS


def test_a_role_that_is_told_to_stop_finishes_what_it_has_and_refuses_the_rest() -> None:
    """F44: prefill, decode and router in turn; nobody's answer is cut, and each exits with 0."""
    with Cluster.start(1, 2, pool_blocks=512, grace_s=40.0) as cluster:
        for role, name in (("prefill", "prefill-0"), ("decode", "decode-0"), ("router", "router")):
            answers = Answers(cluster, 4)
            cluster.kill(role, 0, "front", signal.SIGTERM)
            served = new_request(cluster)
            answers.wait()
            assert [type(end) for end in answers.ends] == [Completion] * 4, answers.ends
            assert isinstance(served, Draining if role == "router" else Completion), served
            wait_for(lambda name=name: name in statuses(cluster), f"the exit of {name}", timeout=45.0)
            assert statuses(cluster)[name] == 0
            cluster.wait_ready(60.0)
        cluster.wait_idle()


def new_request(cluster: Cluster) -> Completion | PacelineError:
    time.sleep(0.3)  # for the signal, and the heart-beat that tells of it
    with cluster.client() as client:
        try:
            return client.complete([3] * 20, max_tokens=2, ignore_eos=True, timeout=20.0)
        except PacelineError as error:
            return error


def statuses(cluster: Cluster) -> dict[str, int]:
    return {event.name: event.status for event in cluster.events if isinstance(event, Died)}


def test_a_client_that_pings_often_keeps_its_stream_through_a_long_silence() -> None:
    """F46: pings every five seconds, also without data, while the engine stands still for twelve."""
    options = [*wire.CHANNEL_OPTIONS, ("grpc.keepalive_time_ms", 5_000), ("grpc.http2.max_pings_without_data", 0)]
    with Cluster.start(1, 1, pool_blocks=256, engine_stall_s=None) as cluster:
        pid = cluster.processes["prefill-0"][1]
        with grpc.insecure_channel(cluster.address, options=options) as channel:
            method = channel.unary_stream("/paceline.v1.Router/Generate")
            os.kill(pid, signal.SIGSTOP)
            try:
                stream = method(ask([3] * 40, max_tokens=4, ignore_eos=True).SerializeToString(), timeout=60.0)
                time.sleep(12.0)
            finally:
                os.kill(pid, signal.SIGCONT)
            pieces = [router_pb2.GenerateResponse.FromString(piece) for piece in stream]
        assert pieces[-1].finish.usage.completion_tokens == 4
        with Client(cluster.address) as client:
            # The router gives a worker whose engine stood still nothing, until it hears that it came round.
            wait_for(
                lambda: client.complete([3] * 20, max_tokens=2, ignore_eos=True).finish.prefill_worker is not None,
                "a prompt for the prefill worker",
            )


def test_a_cluster_that_stops_takes_nothing_new_and_finishes_what_it_has() -> None:
    with Cluster.start(1, 1, pool_blocks=512, grace_s=40.0) as cluster:
        answers = Answers(cluster, 2)
        stopping = threading.Thread(target=cluster.stop)
        stopping.start()
        wait_for(lambda: refused_at_once(cluster), "a refusal", timeout=20.0)
        answers.wait()
        stopping.join(60.0)
    assert [type(end) for end in answers.ends] == [Completion, Completion]


def refused_at_once(cluster: Cluster) -> bool:
    """Whether a new request is told so, rather than served or held."""
    asked = time.monotonic()
    return isinstance(new_request(cluster), PacelineError) and time.monotonic() - asked < 5.0
