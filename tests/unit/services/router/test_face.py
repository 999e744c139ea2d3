"""The router's other methods, and its process, over real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

import paceline
from paceline import wire
from paceline.config import RouterConfig
from paceline.errors import (
    AddressInUse,
    ConfigError,
    Draining,
    EngineLost,
    InvalidRequest,
    NoWorker,
    PacelineError,
    StaleEpoch,
    StartupError,
    UnknownWorker,
)
from paceline.protos import common_pb2, router_pb2
from paceline.services.router import server as router_server
from paceline.services.router.registry import STALLED_S
from paceline.services.router.server import SERVICE, RouterServer, serve
from paceline.testing.router_bench import RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import PATIENCE_S, scripted_decode, scripted_prefill
from paceline.types import FinishReason

CONFIG = msgspec.structs.replace(RouterConfig(), port=0, model="dummy:tiny")


async def test_registering_tells_the_lease_and_the_other_tier() -> None:
    async with (
        scripted_prefill("p0") as prefill,
        scripted_decode("d0") as decode,
        router_bench(lease_s=7.0, heartbeat_s=2.0) as router,
    ):
        first, second = await router.register(prefill, decode)
        assert (wire.seconds(first.lease), wire.seconds(first.heartbeat)) == (7.0, 2.0)
        assert list(first.peers) == []
        [peer] = second.peers
        assert (peer.worker.worker_id, peer.address, peer.role) == ("p0", prefill.address, common_pb2.ROLE_PREFILL)
        assert (peer.lock_id, peer.claim_token) == (prefill.info.lock_id, prefill.claim_token)
        [peer] = (await router.heartbeat(prefill)).peers
        assert peer.worker.worker_id == "d0"
        assert (peer.lock_id, peer.claim_token) == (decode.info.lock_id, decode.claim_token)


async def test_a_worker_that_drains_as_it_registers_gets_nothing() -> None:
    async with scripted_decode("d0") as decode, router_bench(queue_timeout_s=0.2) as router:
        await router.stub.Register(
            router_pb2.RegisterRequest(info=decode.info, load=wire.load_to_proto(decode.load), draining=True)
        )
        assert [worker.draining for worker in (await router.loads()).workers] == [True]
        assert isinstance(await router.ask().error(), NoWorker)
        assert decode.idle


async def test_unknown_and_earlier_lives_are_told_so() -> None:
    async with (
        scripted_decode("d0", epoch=5) as decode,
        scripted_decode("d0", epoch=4) as earlier,
        router_bench() as router,
    ):
        with pytest.raises(UnknownWorker):
            await router.heartbeat(decode)
        await router.register(decode)
        await router.heartbeat(decode)
        with pytest.raises(StaleEpoch):
            await router.heartbeat(earlier)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await router.register(earlier)
        assert isinstance(wire.error_from_rpc(refusal.value), StaleEpoch)


async def test_a_worker_of_another_model_is_refused_with_both_named() -> None:
    async with scripted_decode("d0", model="other") as decode, router_bench() as router:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await router.register(decode)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = wire.error_from_rpc(refusal.value)
        assert isinstance(error, ConfigError)
        assert "'other'" in error.message and "'dummy:tiny'" in error.message


async def test_model_and_server_info_show_the_limits_that_are_enforced() -> None:
    async with scripted_decode("d0", pool_blocks=64) as decode, router_bench(context_tokens=1_000) as router:
        await router.register(decode)
        model = await router.stub.GetModelInfo(router_pb2.GetModelInfoRequest())
        assert (model.model, list(model.eos_token_ids)) == ("dummy:tiny", [2])
        assert (model.limits.context_tokens, model.limits.pool_blocks) == (1_000, 64)
        assert model.has_tokenizer and model.has_chat_template
        server = (await router.stub.GetServerInfo(router_pb2.RouterGetServerInfoRequest())).server
        assert (server.version, list(server.process_ids)) == (paceline.__version__, [os.getpid()])
        assert server.role == common_pb2.ROLE_UNSPECIFIED and not server.HasField("worker")


async def test_a_worker_that_was_started_too_small_shuts_nobody_out() -> None:
    async with (
        scripted_decode("d0", pool_blocks=64) as large,
        scripted_decode("d1", pool_blocks=1) as small,
        router_bench() as router,
    ):
        for decode in (small, large):
            await router.register(decode)
        model = await router.stub.GetModelInfo(router_pb2.GetModelInfoRequest())
        assert model.limits.pool_blocks == 64


async def test_a_worker_with_an_impossible_load_is_refused_and_spoils_nobodys_view() -> None:
    load = common_pb2.Load(tick_age=Duration(seconds=2**63 - 1))
    async with scripted_decode("d0") as good, scripted_decode("d1") as bad, router_bench() as router:
        await router.register(good)
        for call in (
            router.stub.Register(router_pb2.RegisterRequest(info=bad.info, load=load)),
            router.stub.Heartbeat(router_pb2.HeartbeatRequest(worker=wire.key_to_proto(good.key), load=load)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            error = wire.error_from_rpc(refusal.value)
            assert isinstance(error, InvalidRequest) and "load.tick_age: 9.2" in error.message
        assert [worker.info.worker.worker_id for worker in (await router.loads()).workers] == ["d0"]


async def test_loads_list_every_live_worker() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        await router.heartbeat(prefill, draining=True)
        loads = await router.loads()
        assert [(worker.info.worker.worker_id, worker.draining) for worker in loads.workers] == [
            ("d0", False),
            ("p0", True),
        ]
        shown = common_pb2.WorkerInfo.FromString(decode.info.SerializeToString())
        shown.ClearField("claim_token")
        assert loads.workers[0].info == shown
        assert loads.workers[0].load.total_blocks == 128


async def test_a_router_serves_while_it_could_place_a_request() -> None:
    assert SERVICE == "paceline.v1.Router"
    async with (
        scripted_prefill("p0") as prefill,
        scripted_decode("d0") as decode,
        router_bench(lease_s=60.0) as router,
    ):
        await health_becomes(router, "no decode worker is registered")
        await router.register(prefill)
        await health_becomes(router, "no decode worker is registered")
        await router.register(decode)
        await health_becomes(router, None)
        await router.heartbeat(decode, draining=True)
        await health_becomes(
            router, "no decode worker takes work: 1 registered, which drain, stand still or did not answer"
        )
        await router.heartbeat(decode)
        await health_becomes(router, None)


async def test_a_router_does_not_serve_after_the_last_lease_has_ended() -> None:
    async with scripted_decode("d0") as decode, router_bench(lease_s=0.3, heartbeat_s=0.1) as router:
        await router.register(decode)
        await router.until(workers=0)
        await health_becomes(router, "no decode worker is registered")


async def test_a_router_whose_last_decode_worker_failed_does_not_serve_until_it_beats_again() -> None:
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        await health_becomes(router, None)
        asking = router.ask(timeout_s=0.5)
        await (await decode.next_call()).fail(EngineLost("gone"))
        assert isinstance(await asking.error(), PacelineError)
        await health_becomes(
            router, "no decode worker takes work: 1 registered, which drain, stand still or did not answer"
        )
        await router.heartbeat(decode)
        await health_becomes(router, None)


async def test_a_router_that_needs_prefill_workers_does_not_serve_without_one() -> None:
    async with (
        scripted_prefill("p0") as prefill,
        scripted_decode("d0") as decode,
        router_bench(local_prefill="never") as router,
    ):
        await router.register(decode)
        await health_becomes(router, "no prefill worker is registered, and local_prefill is never")
        await router.register(prefill)
        await health_becomes(router, None)
        router.server.fleet.unfit(prefill.key, decode.key)
        await health_becomes(router, "no prefill worker can be paired with a decode worker, and local_prefill is never")


async def test_an_engine_that_comes_to_stand_still_in_silence_ends_the_routers_service_before_its_lease_ends() -> None:
    async with scripted_decode("d0") as decode, router_bench(lease_s=600.0) as router:
        decode.load = msgspec.structs.replace(decode.load, tick_age_ms=(STALLED_S - 1.0) * 1e3)
        await router.register(decode)
        await health_becomes(router, None)
        await health_becomes(
            router, "no decode worker takes work: 1 registered, which drain, stand still or did not answer"
        )


async def test_a_router_that_stops_is_alive_and_does_not_serve() -> None:
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        await health_becomes(router, None)
        asking = router.ask()
        call = await decode.next_call()
        await router.server._health.end()
        stopping = asyncio.create_task(router.server._face.drain(grace_s=30.0))
        await health_becomes(router, "the router is stopping")
        await router.heartbeat(decode)
        await health_becomes(router, "the router is stopping")
        await call.tokens(0, ids_of("a"))
        await call.finish()
        await asking.finish()
        await stopping


async def health_becomes(router: RouterBench, obstacle: str | None) -> None:
    """Waits until the router serves, or does not for this reason. Its process is alive all the time."""
    status = health_pb2.HealthCheckResponse.SERVING if obstacle is None else health_pb2.HealthCheckResponse.NOT_SERVING
    wanted = ({"": status, SERVICE: status, wire.LIVENESS: health_pb2.HealthCheckResponse.SERVING}, obstacle)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            loads = await router.loads()
            why = loads.obstacle if loads.HasField("obstacle") else None
            seen = ({name: await router.health(name) for name in wanted[0]}, why)
            if seen == wanted:
                return
            await asyncio.sleep(0.01)


async def test_while_it_stops_requests_in_hand_end_and_new_ones_are_refused() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask()
        call = await prefill.next_call()
        stopping = asyncio.create_task(router.server._face.drain(grace_s=30.0))
        await asyncio.sleep(0)
        assert isinstance(await router.ask().error(), Draining)
        await call.reply(ids_of("a"), finish=FinishReason.STOP)
        await asking.finish()
        await stopping


async def test_what_outlives_the_grace_is_cut_off_with_a_reason() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask()
        call = await decode.next_call()
        await router.server._face.drain(grace_s=0.05)
        assert isinstance(await asking.error(), Draining)
        await call.seen_cancelled()


async def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    first = RouterServer(CONFIG)
    await first.start()
    try:
        broken = msgspec.structs.replace(CONFIG, port=first.port, model="/no/such/model")
        with pytest.raises(AddressInUse, match=str(first.port)):
            await RouterServer(broken).start()
    finally:
        await first.stop(grace_s=0)


async def test_a_host_that_is_not_ours_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="cannot listen on 203"):
        await RouterServer(msgspec.structs.replace(CONFIG, host="203.0.113.7", port=7070)).start()


async def test_a_model_that_cannot_be_loaded_leaves_nothing_behind() -> None:
    with pytest.raises(StartupError, match="no/such/model"):
        await RouterServer(msgspec.structs.replace(CONFIG, model="/no/such/model")).start()
    with pytest.raises(ConfigError, match="4096 is over the 2048 tokens"):
        await RouterServer(msgspec.structs.replace(CONFIG, context_tokens=4_096)).start()


async def test_metrics_are_served_and_name_no_text() -> None:
    server = RouterServer(CONFIG)
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    finally:
        await server.stop(grace_s=0)
    assert "paceline_router_queued_requests 0.0" in page


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_serving_cleanly(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()

    class Started(RouterServer):
        async def start(self) -> None:
            await super().start()
            started.set()

    monkeypatch.setattr(router_server, "RouterServer", Started)
    serving = asyncio.create_task(serve(CONFIG))
    async with asyncio.timeout(20):
        await started.wait()
        os.kill(os.getpid(), number)
        await serving
