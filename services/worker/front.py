"""The front process of a worker: the gRPC server, the registration, and the engine process beside it.

Everything here is the same for both tiers; a tier adds its servicer and what it does with its engine's reports. The
life of a front: bind the port, take the start lock, spawn the engine, wait for the end of its warm-up, serve, register.
It ends by a signal (drain, then exit 0), or at once when the engine is lost (exit 1): it ended, or it stood still for
`engine_stall_s` and was killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final, Generic, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health as health_names
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

import paceline
from paceline import log, metrics, wire
from paceline.config import DecodeConfig, PrefillConfig, advertised_address, ensure_run_dir, worker_name
from paceline.errors import AddressInUse, Draining, EngineLost, PacelineError, StaleEpoch, WorkerLost
from paceline.garbage import set_aside_what_lives
from paceline.protos import common_pb2
from paceline.services.worker.convert import fingerprint_to_proto
from paceline.services.worker.engine_client import EngineClient
from paceline.services.worker.kv_events import KvEvents
from paceline.services.worker.messages import Ready, Report
from paceline.services.worker.registration import PeerInfo, Registration
from paceline.services.worker.start_lock import StartLock
from paceline.types import Role, WorkerKey, WorkerLoad

_log = log.get_logger(__name__)

_STALLED_S: Final = 15.0
_MOST_AT_ONCE: Final = 8_192
"""Ids of a prompt that are read on the event loop: under a millisecond's work, without a thread there and back."""
_FAREWELL_S: Final = 0.5
RESTART_STATUS: Final = 3
"""Exit status of a worker that wants to be started again, with a fresh pool."""

Config = TypeVar("Config", PrefillConfig, DecodeConfig)
Request = TypeVar("Request")
Command = TypeVar("Command")


class WorkerFront(ABC, Generic[Config]):
    """One worker. `serve` is its whole life."""

    role: ClassVar[Role]
    engine_module: ClassVar[str]
    report_type: ClassVar[type[Report]]
    service_name: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.config: Config = config
        self.draining = False
        self.key: WorkerKey
        self.engine: EngineClient
        self.ready: Ready
        self.registration: Registration
        self.claim_token = secrets.token_bytes(32)
        self.lock_id: str
        self.metrics = metrics.WorkerMetrics(metrics.process_registry())
        self.kv_events = KvEvents()
        self._address: str
        self._metrics_port: int | None = None
        self._signalled: asyncio.Future[None]
        self._status = 0
        self._started = time.monotonic()
        self._idle = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    # What a tier adds

    @abstractmethod
    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Adds the tier's service to the server."""

    @abstractmethod
    def reported(self, report: Any) -> None:
        """Takes in the tier's part of a report of the engine."""

    @abstractmethod
    def peer_found(self, peer: PeerInfo) -> None:
        """A new life of a worker of the other tier was registered."""

    @abstractmethod
    def fail_all(self, error: PacelineError) -> None:
        """Ends every call in hand with the error."""

    @property
    @abstractmethod
    def calls_in_hand(self) -> int:
        """Requests that are not over."""

    # What tiers use

    @property
    def load(self) -> WorkerLoad:
        """The engine's load."""
        return self.engine.load

    def send(self, command: msgspec.Struct) -> None:
        """Queues a command for the engine; Overloaded when it is too far behind."""
        self.engine.send(command)

    def check_epoch(self, epoch: int) -> None:
        """Raises StaleEpoch where another life of this worker was meant."""
        if epoch != self.key.epoch:
            raise StaleEpoch(f"this is {self.key}, and epoch {epoch} was meant")

    def request_restart(self) -> None:
        """Drains, and exits with the status that asks the supervisor for a new life."""
        self._status = RESTART_STATUS
        if not self._signalled.done():
            self._signalled.set_result(None)

    def admit(self, epoch: int) -> None:
        """Raises StaleEpoch or Draining where a new request must be refused."""
        self.check_epoch(epoch)
        if self.draining:
            raise Draining(f"{self.key} is draining and takes nothing new")

    async def read(self, request: Request, prompt_tokens: int, validated: Callable[[Request], Command]) -> Command:
        """What `validated` makes of a request; on a thread where its prompt is long."""
        if prompt_tokens <= _MOST_AT_ONCE:
            return validated(request)
        return await asyncio.to_thread(validated, request)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the calls; what it raises is logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def server_info(self) -> common_pb2.ServerInfo:
        """What GetServerInfo answers."""
        return common_pb2.ServerInfo(
            version=paceline.__version__,
            role=wire.role_to_proto(self.role),
            worker=wire.key_to_proto(self.key),
            model=self.ready.fingerprint.model,
            limits=wire.limits_to_proto(self.ready.limits),
            uptime=wire.duration(time.monotonic() - self._started),
            fingerprint=fingerprint_to_proto(self.ready.fingerprint),
            transport=self.ready.transport,
            process_ids=[os.getpid(), self.engine.pid],
        )

    async def drain(self) -> None:
        """Takes nothing new, tells the routers, and returns when nothing is left."""
        if not self.draining:
            self.draining = True
            _log.info("draining", calls=self.calls_in_hand)
            self.registration.hurry()
        while not self._drained():
            self._idle.clear()
            await self._idle.wait()

    # The life

    async def serve(self) -> int:
        """Serves until a signal or the engine's end; returns the exit status."""
        config = self.config
        server = grpc.aio.server(options=wire.SERVER_OPTIONS)
        port = _bind(server, config.host, config.port)
        run_dir = ensure_run_dir(config.run_dir)
        lock = await asyncio.to_thread(StartLock.acquire, run_dir, worker_name(config, port=port))
        self.key, self.lock_id = WorkerKey(lock.directory.name, lock.epoch), lock.identity
        log.configure(self.role.value, config.log_level, config.log_json, worker=str(self.key))
        endpoint = None
        try:
            if config.metrics_port is not None:
                endpoint = metrics.serve(config.metrics_port, config.host, self.metrics.registry)
                self._metrics_port = endpoint.port
            self._address = advertised_address(config, port=port)
            self.engine = EngineClient.spawn(
                self.engine_module, config, self.key, lock, report=self.report_type, on_report=self._on_report
            )
            try:
                return await self._run(server)
            finally:
                await self.engine.stop()
        finally:
            if endpoint is not None:
                endpoint.close()
            await server.stop(None)
            lock.release()

    async def _run(self, server: grpc.aio.Server) -> int:
        signalled = self._signalled = _on_signals()
        starting = asyncio.create_task(self.engine.ready())
        await _first(starting, signalled)
        if not starting.done():
            starting.cancel()
            return 0
        self.ready = starting.result()
        _count_load(self.metrics, self.load)
        self.registration = Registration(
            self.config.router,
            self._worker_info(),
            load=lambda: self.load,
            draining=lambda: self.draining,
            on_peer=self.peer_found,
        )
        servicer = self._add_services(server)
        await server.start()
        self.registration.start()
        set_aside_what_lives()
        await servicer.set(wire.LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set_health(servicer, serving=True)
        _log.info(
            "serving",
            address=self._address,
            metrics_port=self._metrics_port,
            pool_blocks=self.ready.limits.pool_blocks,
        )
        try:
            return await self._until_the_end(server, servicer, signalled)
        finally:
            for task in list(self._background):
                task.cancel()
            await self.registration.close()

    async def _until_the_end(
        self, server: grpc.aio.Server, servicer: health.HealthServicer, signalled: asyncio.Future[None]
    ) -> int:
        lost = asyncio.create_task(self.engine.lost())
        watch = asyncio.create_task(self._watch_health(servicer))
        await _first(lost, signalled)
        watch.cancel()
        await self._set_health(servicer, serving=False)
        if not lost.done():
            drained = asyncio.create_task(self.drain())
            await _first(lost, drained, timeout_s=self.config.grace_s)
            drained.cancel()
        if lost.done():
            loss = lost.result()
            _log.error("engine lost", why=loss.why, reaped=loss.reaped)
            self.draining = True  # for the heart-beats of its last moments
            # One that could not be reaped may still write: only its worker is lost, and its attempts are not over.
            kind = EngineLost if loss.reaped else WorkerLost
            self.fail_all(kind(f"the engine of {self.key} {loss.why}"))
            await server.stop(_FAREWELL_S)
            return 1
        lost.cancel()
        if self.calls_in_hand:
            _log.warning("grace period over", calls_cut=self.calls_in_hand)
            self.fail_all(Draining(f"{self.key} stops"))
        await server.stop(_FAREWELL_S)
        _log.info("stopped", status=self._status)
        return self._status

    def _add_services(self, server: grpc.aio.Server) -> health.HealthServicer:
        self.add_servicer(server)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection(
            [self.service_name, health_names.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        return servicer

    async def _set_health(self, servicer: health.HealthServicer, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self.service_name):
            await servicer.set(name, status)

    async def _watch_health(self, servicer: health.HealthServicer) -> None:
        """A loop that does not come round is as bad as a dead one, and must look so."""
        serving = True
        while True:
            await asyncio.sleep(1.0)
            alive = self.load.tick_age_ms < _STALLED_S * 1e3
            if alive is not serving:
                serving = alive
                _log.warning("engine loop", stalled=not alive)
                await self._set_health(servicer, serving=alive)

    def _worker_info(self) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo(
            worker=wire.key_to_proto(self.key),
            role=wire.role_to_proto(self.role),
            address=self._address,
            model=self.ready.fingerprint.model,
            limits=wire.limits_to_proto(self.ready.limits),
            fingerprint=fingerprint_to_proto(self.ready.fingerprint),
            eos_token_ids=self.ready.eos_token_ids,
            lock_id=self.lock_id,
            claim_token=self.claim_token,
        )

    def _on_report(self, report: Report) -> None:
        _count(self.metrics, report)
        self.kv_events.take(report.kv)
        self.reported(report)
        if self.draining and self._drained():
            self._idle.set()

    def _drained(self) -> bool:
        load = self.load
        # Quarantined blocks may never come back, and are no work.
        return self.calls_in_hand == 0 and load.committed_blocks == load.quarantined_blocks

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", error=repr(error))


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Returns when one of them is done, or at the time-out."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: another process does, or the address is not ours") from error


def _on_signals() -> asyncio.Future[None]:
    """Done at the first SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not signalled.done():
            signalled.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return signalled


def _count_load(counted: metrics.WorkerMetrics, load: WorkerLoad) -> None:
    counted.running.set(load.running)
    counted.waiting.set(load.waiting)
    counted.set_pool(
        total=load.total_blocks,
        free=load.free_blocks,
        committed=load.committed_blocks,
        quarantined=load.quarantined_blocks,
    )


def _count(counted: metrics.WorkerMetrics, report: Report) -> None:
    activity = report.activity
    _count_load(counted, report.load)
    if activity.step_seconds:
        counted.steps.inc()
        counted.step_seconds.observe(activity.step_seconds)
        counted.batch_requests.observe(activity.batch_requests)
        counted.prompt_tokens.inc(activity.prompt_tokens)
        counted.generated_tokens.inc(activity.generated_tokens)
        counted.recomputed_tokens.inc(activity.recomputed_tokens)
        counted.prefix_queried_tokens.inc(activity.prefix_queried_tokens)
        counted.prefix_hit_tokens.inc(activity.prefix_hit_tokens)
    counted.preemptions.inc(activity.preemptions)
    for num_bytes, seconds in activity.writes:
        counted.transfer_bytes.inc(num_bytes)
        counted.transfer_seconds.observe(seconds)
    counted.transfer_parts.labels("landed").inc(activity.parts_landed)
    counted.transfer_parts.labels("sent").inc(activity.parts_sent)
    counted.transfer_failures.labels("write_failed").inc(activity.failed_writes)
    for state, number in report.reservations.items():
        counted.reservations.labels(state).set(number)
    for reason, number in report.ignored.items():
        counted.ignored_events.labels(reason).inc(number)
