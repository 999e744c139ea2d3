"""Assembles an engine process: the model, the engine, and the transfer agent over the engine's pool.

The engine knows no network and the agent knows no requests; what joins them is plain block ids, here and in the tiers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import torch

from paceline.checkpoint import reader, source
from paceline.config import WorkerConfig
from paceline.engine import weights
from paceline.engine.engine import Engine, EngineStats
from paceline.errors import ConfigError
from paceline.kvtransfer import transports
from paceline.kvtransfer.agent import SETTLE_S, TransferAgent
from paceline.kvtransfer.layout import Fingerprint, KvLayout
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import loopback
from paceline.log import get_logger
from paceline.services.worker.messages import Ready
from paceline.types import RequestId, SamplingParams, WorkerKey

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine process runs, and the description of it."""

    engine: Engine
    agent: TransferAgent
    ready: Ready


def build(config: WorkerConfig, worker: WorkerKey, *, hub: loopback.Hub | None = None) -> Host:
    """Loads the model and warms it up. Raises a StartupError that says what to change. `hub` is for tests."""
    if config.device != "cpu":
        raise ConfigError(f"device: {config.device!r} is not served by this version, which computes on cpu")
    checkpoint = source.resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
    shape = reader.read_config(checkpoint)
    if config.context_tokens is not None:
        if config.context_tokens > shape.context_tokens:
            raise ConfigError(
                f"context_tokens: {config.context_tokens} is over the {shape.context_tokens} tokens of {config.model}"
            )
        shape = msgspec.structs.replace(shape, context_tokens=config.context_tokens)
    tensors = weights.load(
        checkpoint, shape, dtype=getattr(torch, config.dtype), device=torch.device(config.device), seed=config.seed
    )
    engine = Engine(
        shape,
        tensors,
        num_blocks=config.pool_blocks,
        token_budget=config.max_batch_tokens,
        max_requests=config.max_running,
        prefix_cache=config.prefix_cache,
        watermark=config.watermark,
    )
    pool = engine.runner.pool
    layout = KvLayout.of(shape, dtype=config.dtype)
    region = Region(pool.data_ptr(), config.pool_blocks, layout.block_bytes)
    [group] = layout.groups
    fingerprint = Fingerprint.of(
        group, model=checkpoint.name, weights_digest=reader.digest(checkpoint, seed=config.seed)
    )
    chosen = transports.create(config.transport, f"{worker}", hub=hub)
    _log.info("transport chosen", transport=chosen.name, why=chosen.why)
    # Nothing lingers in buffers of the in-memory twin.
    settle_s = SETTLE_S if hub is None else 0.0
    agent = TransferAgent(chosen.transport, worker, region, fingerprint, settle_s=settle_s)
    _warm_up(engine)
    return Host(
        engine,
        agent,
        Ready(
            limits=engine.limits,
            fingerprint=fingerprint,
            eos_token_ids=shape.eos_token_ids,
            transport=chosen.name,
        ),
    )


def use_threads(config: WorkerConfig) -> None:
    """Gives the process its share of the cores; once, before anything computes."""
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    torch.set_num_interop_threads(1)


def _warm_up(engine: Engine) -> None:
    """Runs a prompt and a decode step, so that the first request does not pay for lazy initialisation."""
    lease = engine.try_reserve(2)
    assert lease is not None, "an empty pool has room for one block"
    engine.add(RequestId("warm-up"), [0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), lease=lease)
    while engine.has_work:
        engine.step()
    engine.stats = EngineStats()  # which are of requests
