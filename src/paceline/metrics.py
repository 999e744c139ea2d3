"""Prometheus metrics of a process, and the HTTP endpoint that shows them.

A process makes one `RouterMetrics` or `WorkerMetrics` at its entry point and hands it down; importing this file
registers nothing. Times are in seconds and sizes in bytes, tokens or KV blocks, as the names say.
"""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import MetricsHandler
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from paceline.errors import AddressInUse, StartupError
from paceline.log import get_logger

_log = get_logger(__name__)

FIRST_TOKEN_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
INTER_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
REQUEST_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
STEP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TRANSFER_BUCKETS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 10)
_NO_DESCRIPTOR_S: Final = 0.2
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def process_registry() -> CollectorRegistry:
    """A registry with the process's own CPU, memory and garbage-collector figures."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class RouterMetrics:
    """What the router counts. One per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "paceline_router_requests",
            "Requests that ended, by outcome: a finish reason, or an error's reason in lower case.",
            ["outcome"],
            registry=registry,
        )
        self.active = Gauge("paceline_router_active_requests", "Requests placed and not ended.", registry=registry)
        self.queued = Gauge("paceline_router_queued_requests", "Requests that wait for a worker.", registry=registry)
        self.queue_seconds = Histogram(
            "paceline_router_queue_seconds", "Wait in the queue.", buckets=FIRST_TOKEN_BUCKETS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "paceline_router_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "paceline_router_inter_token_seconds",
            "Between one token of a request and the next.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "paceline_router_request_seconds",
            "From a request's arrival to its end.",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("paceline_router_prompt_tokens", "Prompt tokens received.", registry=registry)
        self.generated_tokens = Counter(
            "paceline_router_generated_tokens", "Tokens sent to clients.", registry=registry
        )
        self.placements = Counter(
            "paceline_router_placements",
            "Requests placed, by where the prompt is computed: prefill or decode.",
            ["prompt_on"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "paceline_router_fallbacks",
            "Prompts computed elsewhere than planned or preferred, by reason.",
            ["reason"],
            registry=registry,
        )
        self.workers = Gauge(
            "paceline_router_live_workers", "Workers with a lease, by role.", ["role"], registry=registry
        )
        self.heartbeats = Counter(
            "paceline_router_heartbeats", "Heart-beats, by result: ok or unknown.", ["result"], registry=registry
        )


class WorkerMetrics:
    """What a prefill or decode worker counts. One per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.steps = Counter("paceline_engine_steps", "Steps that ran.", registry=registry)
        self.step_seconds = Histogram(
            "paceline_engine_step_seconds", "Time of one step.", buckets=STEP_BUCKETS, registry=registry
        )
        self.batch_requests = Histogram(
            "paceline_engine_batch_requests", "Requests in a step.", buckets=BATCH_BUCKETS, registry=registry
        )
        self.prompt_tokens = Counter(
            "paceline_engine_prompt_tokens_computed", "Prompt tokens computed here.", registry=registry
        )
        self.generated_tokens = Counter("paceline_engine_generated_tokens", "Tokens sampled here.", registry=registry)
        self.recomputed_tokens = Counter(
            "paceline_engine_recomputed_tokens", "Tokens computed again after a preemption.", registry=registry
        )
        self.prefix_queried_tokens = Counter(
            "paceline_prefix_queried_tokens",
            "Prompt tokens of requests that were sampled here, each request once.",
            registry=registry,
        )
        self.prefix_hit_tokens = Counter(
            "paceline_prefix_hit_tokens", "Of the queried ones, those found in the prefix cache.", registry=registry
        )
        self.running = Gauge("paceline_engine_running_requests", "Requests in the batch.", registry=registry)
        self.waiting = Gauge(
            "paceline_engine_waiting_requests", "Requests accepted and not in the batch.", registry=registry
        )
        self.preemptions = Counter(
            "paceline_engine_preemptions", "Requests put back to be recomputed.", registry=registry
        )
        self.pool_blocks = Gauge(
            "paceline_pool_blocks",
            "KV blocks by state: total, free, committed (held, or expected to be soon) and quarantined.",
            ["state"],
            registry=registry,
        )
        self.transfer_bytes = Counter("paceline_transfer_bytes", "KV bytes written to peers.", registry=registry)
        self.transfer_parts = Counter(
            "paceline_transfer_parts",
            "Parts of hand-offs, by direction: sent or landed.",
            ["direction"],
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "paceline_transfer_seconds",
            "Time that the writes of one hand-off were under way, as the writer sees it.",
            buckets=TRANSFER_BUCKETS,
            registry=registry,
        )
        self.transfer_failures = Counter(
            "paceline_transfer_failures", "Writes that failed, by reason.", ["reason"], registry=registry
        )
        self.reservations = Gauge(
            "paceline_reservations", "Reservations by state, in lower case.", ["state"], registry=registry
        )
        self.reservations_ended = Counter(
            "paceline_reservations_ended",
            "Reservations that ended, by the state that the end found them in and its cause, in lower case.",
            ["state", "cause"],
            registry=registry,
        )
        self.ignored_events = Counter(
            "paceline_ignored_events",
            "Events that reached a reservation too late, twice or from an earlier life, by reason.",
            ["reason"],
            registry=registry,
        )
        self.aborts = Counter("paceline_aborts", "Requests aborted here, by reason.", ["reason"], registry=registry)
        self.refusals = Counter("paceline_refusals", "Requests refused here, by reason.", ["reason"], registry=registry)

    def set_pool(self, *, total: int, free: int, committed: int, quarantined: int) -> None:
        """Sets the gauges of the pool, in blocks."""
        for state, blocks in (
            ("total", total),
            ("free", free),
            ("committed", committed),
            ("quarantined", quarantined),
        ):
            self.pool_blocks.labels(state).set(blocks)


class MetricsServer:
    """The HTTP endpoint, on a thread that sleeps until it is asked. Close it once; also a context manager."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """Address that is listened on."""
        return str(self._server.server_address[0])

    @property
    def port(self) -> int:
        """Port that is listened on: the real one where 0 was asked for."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops the thread and frees the port. A second call does nothing."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._server.server_close()
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> None:
        # `serve_forever` wakes twice a second to look at a flag; a socket in the same select needs no waking.
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                self._server.handle_request()


def serve(port: int, host: str, registry: CollectorRegistry) -> MetricsServer:
    """Serves `registry` at http://host:port/metrics; port 0 takes a free one. Raises AddressInUse naming host:port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = _server_class(family)((host, port), _handler_class(registry))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"metrics_port: another process listens on {host}:{port}") from error
        raise StartupError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return MetricsServer(server)


def _server_class(family: socket.AddressFamily) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = family
        daemon_threads = True
        timeout = 0  # a connection that is gone again must not block the loop

        def get_request(self) -> tuple[socket.socket, Any]:
            """Waits a moment where no descriptor is left: the connection stays pending, and wakes at once again."""
            try:
                return super().get_request()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_NO_DESCRIPTOR_S)
                raise

        def handle_error(self, request: object, client_address: object) -> None:
            """The library's own prints a traceback past the log."""
            if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # whoever asked is gone
                _log.exception("metrics were not served", peer=str(client_address))

    return Server


def _handler_class(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    # 10 seconds, after which a client that sends nothing frees its thread.
    return type("Handler", (MetricsHandler.factory(registry),), {"timeout": 10})
