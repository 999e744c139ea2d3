from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import struct
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline.errors import AddressInUse, StartupError
from paceline.metrics import RouterMetrics, WorkerMetrics, process_registry, serve


def scrape(host: str, port: int) -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as reply:
        return str(reply.read(), "utf-8")


def test_the_endpoint_shows_what_was_counted() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    with serve(0, "127.0.0.1", registry) as server:
        metrics.requests.labels("stop").inc()
        metrics.first_token_seconds.observe(0.04)
        text = scrape(server.host, server.port)
    assert 'paceline_router_requests_total{outcome="stop"} 1.0' in text
    assert 'paceline_router_time_to_first_token_seconds_bucket{le="0.05"} 1.0' in text


def test_a_workers_pool_is_shown_by_state() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).set_pool(total=10, free=4, committed=5, quarantined=1)
    text = generate_latest(registry).decode()
    assert 'paceline_pool_blocks{state="quarantined"} 1.0' in text
    assert 'paceline_pool_blocks{state="free"} 4.0' in text


def test_names_follow_the_conventions_of_prometheus() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    WorkerMetrics(registry)
    for metric in registry.collect():
        assert re.fullmatch(r"paceline_[a-z_]+", metric.name), metric.name
        assert not metric.name.endswith(("_ms", "_milliseconds", "_kb", "_total")), metric.name
        assert metric.documentation.endswith("."), metric.name
        if metric.type == "histogram":
            assert metric.name.endswith(("_seconds", "_requests")), metric.name


def test_two_sets_of_metrics_live_in_one_process() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(first).steps.inc()
    WorkerMetrics(second)
    assert second.get_sample_value("paceline_engine_steps_total") == 0


def test_the_process_itself_is_measured() -> None:
    value = process_registry().get_sample_value("process_resident_memory_bytes")
    assert value is not None and value > 0


def test_a_port_that_is_taken_is_named() -> None:
    with serve(0, "127.0.0.1", CollectorRegistry()) as server, pytest.raises(AddressInUse) as caught:
        serve(server.port, "127.0.0.1", CollectorRegistry())
    assert f"127.0.0.1:{server.port}" in caught.value.message


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1:9"):
        serve(9, "192.0.2.1", CollectorRegistry())


def test_closing_frees_the_port_and_a_second_close_does_nothing() -> None:
    server = serve(0, "127.0.0.1", CollectorRegistry())
    server.close()
    server.close()
    with serve(server_port(server.host), "127.0.0.1", CollectorRegistry()) as again:
        assert again.port > 0


def wait_for_handlers() -> None:
    """Returns when no connection is being served."""
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)


def server_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def test_a_client_that_says_nothing_does_not_hold_up_another() -> None:
    registry = CollectorRegistry()
    with serve(0, "127.0.0.1", registry) as server, socket.create_connection((server.host, server.port)):
        assert scrape(server.host, server.port) == generate_latest(registry).decode()


def test_an_idle_endpoint_uses_no_processor_time() -> None:
    with serve(0, "127.0.0.1", CollectorRegistry()):
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.02


def test_a_client_that_goes_away_in_the_middle_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    registry = CollectorRegistry()
    with serve(0, "127.0.0.1", registry) as server:
        for _ in range(5):
            with socket.create_connection((server.host, server.port)) as client:
                client.sendall(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n")
                # Closed with a reset: what the endpoint writes finds nobody.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        scrape(server.host, server.port)
        wait_for_handlers()
    assert "Traceback" not in capfd.readouterr().err


def test_an_endpoint_without_descriptors_waits_without_spinning_and_serves_when_there_are_some() -> None:
    registry = CollectorRegistry()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(0, "127.0.0.1", registry) as server, socket.socket() as client:
        # Its thread has made what it waits with, and this is closed: no descriptor comes or goes from here on.
        scrape(server.host, server.port)
        wait_for_handlers()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) - 1, hard))
        held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            client.connect((server.host, server.port))
            before, began = time.process_time(), time.monotonic()
            time.sleep(1.0)
            used = (time.process_time() - before) / (time.monotonic() - began)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert used < 0.3
        assert scrape(server.host, server.port) == generate_latest(registry).decode()
