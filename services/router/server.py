"""The router's process: from its settings to a served port, and from SIGTERM to a clean exit."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline import metrics, wire
from paceline.checkpoint import read_config, resolve
from paceline.config import RouterConfig
from paceline.errors import AddressInUse, ConfigError, StartupError
from paceline.garbage import set_aside_what_lives
from paceline.log import get_logger
from paceline.metrics import RouterMetrics, process_registry
from paceline.protos import router_pb2, router_pb2_grpc
from paceline.services.router.admission import Admission
from paceline.services.router.face import RouterFace
from paceline.services.router.fleet import Fleet, Placed
from paceline.services.router.health import RouterHealth
from paceline.services.router.placement import LocalPrefill, Policy
from paceline.services.router.prompt import PromptReader, own_limits
from paceline.services.router.registry import STALLED_S
from paceline.services.router.relay import Means
from paceline.text import ChatTemplate, Tokenizer

_log = get_logger(__name__)

SERVICE: Final = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
_FAREWELL_S: Final = 1.0
"""What is left of each call, once its relay has ended, gets this long to reach its client."""


class RouterServer:
    """A router that serves, between `start` and `stop`. Reads no signals."""

    def __init__(
        self, config: RouterConfig, *, load_reader: Callable[[RouterConfig], tuple[PromptReader, int]] | None = None
    ) -> None:
        """`load_reader` gives the model's text side and its context in tokens; by default from its checkpoint."""
        self.config = config
        self._load_reader = load_reader or load_model
        self.port = 0  # what is listened on, once started
        self.metrics_port: int | None = None
        self._cleanup = AsyncExitStack()

    async def start(self) -> None:
        """Loads the model's text side, binds and serves. Raises a StartupError that says what to change."""
        async with AsyncExitStack() as stack:
            server = grpc.aio.server(options=wire.SERVER_OPTIONS)
            stack.push_async_callback(server.stop, None)
            # First of all, so that a port in use is known before a model is fetched.
            self.port = bind(server, self.config.host, self.config.port)
            router_metrics = RouterMetrics(process_registry())
            if self.config.metrics_port is not None:
                endpoint = metrics.serve(self.config.metrics_port, self.config.host, router_metrics.registry)
                stack.callback(endpoint.close)
                self.metrics_port = endpoint.port
            reader, context_tokens = await asyncio.to_thread(self._load_reader, self.config)
            stack.callback(reader.close)
            self.fleet = self._make_fleet(stack, router_metrics)
            self._face = self._make_face(stack, reader, router_metrics, context_tokens)
            router_pb2_grpc.add_RouterServicer_to_server(self._face, server)
            self._health = await RouterHealth.begin(SERVICE, lambda: self._face.obstacle)
            self.fleet.on_change = self._health.look
            stack.push_async_callback(self._health.close)
            health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
            reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
            await server.start()
            set_aside_what_lives()
            stack.push_async_callback(server.stop, _FAREWELL_S)
            self._cleanup = stack.pop_all()
        _log.info("serving", host=self.config.host, port=self.port, metrics_port=self.metrics_port, model=reader.model)

    async def stop(self, *, grace_s: float) -> None:
        """Takes nothing new, lets what is in hand end within `grace_s`, and closes everything."""
        await self._health.end()
        await self._face.drain(grace_s=grace_s)
        await self._cleanup.aclose()
        _log.info("stopped")

    def _make_fleet(self, stack: AsyncExitStack, router_metrics: RouterMetrics) -> Fleet:
        config = self.config
        policy = Policy(
            local_prefill=LocalPrefill(config.local_prefill),
            local_prefill_below=config.local_prefill_below,
            prefill_slots=config.prefill_slots,
        )
        # A load is as old as a heart-beat before the next one comes.
        stalled_s = max(STALLED_S, 2 * config.heartbeat_s)
        fleet = Fleet(lease_s=config.lease_s, stalled_s=stalled_s, policy=policy, metrics=router_metrics)
        stack.push_async_callback(fleet.close)
        watch = asyncio.get_running_loop().create_task(fleet.watch(), name="leases")
        stack.push_async_callback(_cancel, watch)
        return fleet

    def _make_face(
        self, stack: AsyncExitStack, reader: PromptReader, router_metrics: RouterMetrics, context_tokens: int
    ) -> RouterFace:
        config = self.config
        admission: Admission[Placed] = Admission(size=config.queue_size, patience_s=config.queue_timeout_s)
        stack.callback(admission.close)
        self.fleet.on_room = admission.wake
        router_metrics.queued.set_function(lambda: len(admission))
        means = Means(
            fleet=self.fleet,
            admission=admission,
            metrics=router_metrics,
            own_limits=own_limits(reader.tokenizer, context_tokens=context_tokens),
            queue_timeout_s=config.queue_timeout_s,
            max_unacked_tokens=config.max_unacked_tokens,
        )
        return RouterFace(
            means, reader, lease_s=config.lease_s, heartbeat_s=config.heartbeat_s, queue_size=config.queue_size
        )


async def serve(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains within `grace_s` and returns. Raises StartupError."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    try:
        router = RouterServer(config)
        starting = loop.create_task(router.start())
        stopping = loop.create_task(signalled.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await _cancel(starting)
            return
        starting.result()
        await stopping
        _log.info("stopping", grace_s=config.grace_s)
        await router.stop(grace_s=config.grace_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """The port that the server is bound to. Raises AddressInUse, or StartupError for a host that is none of ours."""
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    # gRPC does not say why it could not bind, and prints a line of its own; a plain socket is asked first.
    _probe(host.strip("[]"), port, address)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(f"port: another process listens on {address}") from error


def _probe(host: str, port: int, address: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections that linger from an earlier process are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"port: another process listens on {address}") from error
        raise StartupError(f"port: cannot listen on {address}: {error.strerror or error}") from error


def load_model(config: RouterConfig) -> tuple[PromptReader, int]:
    """The model's reader, and its enforced context in tokens. Blocks: it may fetch the model."""
    source = resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
    shape = read_config(source)
    if config.context_tokens is not None and config.context_tokens > shape.context_tokens:
        raise ConfigError(
            f"context_tokens: {config.context_tokens} is over the {shape.context_tokens} tokens of {config.model}"
        )
    tokenizer = Tokenizer.load(source)
    chat = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
    reader = PromptReader(shape.name, tokenizer, chat, timeout_s=config.request_timeout_s)
    return reader, config.context_tokens or shape.context_tokens


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})  # which, unlike a suppressed await, does not swallow our own cancellation
