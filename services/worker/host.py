"""Assembles an engine process: the model, the engine, and the transfer agent over the engine's pool.

The engine knows no network and the agent knows no requests; what joins them is plain block ids, here and in the tiers.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from paceline import kernels
from paceline.checkpoint import reader, source
from paceline.checkpoint.kv_groups import KvGroups
from paceline.checkpoint.model_config import ModelConfig
from paceline.config import WorkerConfig
from paceline.engine import device, weights
from paceline.engine.engine import Engine
from paceline.engine.stats import EngineStats
from paceline.errors import ConfigError, NumericalError, StartupError
from paceline.kernels import native
from paceline.kvtransfer import transports
from paceline.kvtransfer.agent import SETTLE_S, TransferAgent
from paceline.kvtransfer.layout import Fingerprint, KvLayout
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import loopback
from paceline.log import get_logger
from paceline.services.worker.messages import Ready
from paceline.types import RequestId, SamplingParams, WorkerKey

_log = get_logger(__name__)

CPU_POOL_BLOCKS: Final = 1024
"""Blocks of a pool in host memory, unless asked for otherwise."""
_TELL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine process runs, and the description of it."""

    engine: Engine
    agent: TransferAgent
    ready: Ready


def build(config: WorkerConfig, worker: WorkerKey, *, hub: loopback.Hub | None = None) -> Host:
    """Loads the model and warms it up. Raises a StartupError that says what to change. `hub` is for tests."""
    compute_device = device.open_device(config.compute_device)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if config.on_gpu else "float32"
    kernels.set_batch_invariant(config.batch_invariant)
    checkpoint = source.resolve(config.model, cache_dir=config.cache_dir, offline=config.offline)
    shape = reader.read_config(checkpoint)
    if config.context_tokens is not None:
        if config.context_tokens > shape.context_tokens:
            raise ConfigError(
                f"context_tokens: {config.context_tokens} is over the {shape.context_tokens} tokens of {config.model}"
            )
        shape = msgspec.structs.replace(shape, context_tokens=config.context_tokens)
    device.check_weights_fit(shape, getattr(torch, dtype), compute_device)
    tensors = weights.load(
        checkpoint,
        shape,
        dtype=getattr(torch, dtype),
        device=compute_device,
        seed=config.seed,
        progress=_told_now_and_then("loading weights"),
    )
    engine = _engine(config, shape, tensors)
    pool = engine.runner.pool
    layout = KvLayout.of(shape, dtype=dtype)
    region = Region(
        pool.data_ptr(),
        engine.pool.total,
        layout.block_bytes,
        device="cuda" if config.on_gpu else "cpu",
        device_index=compute_device.index or 0,
    )
    fingerprint = Fingerprint.of(
        layout, model=checkpoint.name, weights_digest=reader.digest(checkpoint, seed=config.seed)
    )
    chosen = transports.create(config.transport, f"{worker}", hub=hub, device=region.device)
    _log.info("transport chosen", transport=chosen.name, why=chosen.why)
    # Nothing lingers in buffers of the in-memory twin.
    settle_s = SETTLE_S if hub is None else 0.0
    agent = TransferAgent(chosen.transport, worker, region, fingerprint, settle_s=settle_s)
    try:
        _warm_up(engine, on_gpu=config.on_gpu)
    except NumericalError as error:
        raise StartupError(
            f"{config.model} as {dtype}: the first step's logits are NaN or infinite. "
            f"Its weights are damaged, or too large for {dtype}: try another --dtype"
        ) from error
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


def _engine(config: WorkerConfig, shape: ModelConfig, tensors: weights.Weights) -> Engine:
    # Asked for by what they hold of all layers; a block is for the layers of one KV group.
    groups = len(KvGroups.of(shape))
    runner, num_blocks = None, groups * (config.pool_blocks or CPU_POOL_BLOCKS)
    if config.on_gpu:
        runner = device.create_runner(
            shape,
            tensors,
            num_blocks=None if config.pool_blocks is None else num_blocks,
            token_budget=config.step_tokens,
            max_requests=config.step_requests,
            fraction=config.memory_fraction,
            progress=_told_now_and_then("capturing graphs"),
        )
        num_blocks = runner.pool.shape[0]
    try:
        return Engine(
            shape,
            tensors,
            num_blocks=num_blocks,
            token_budget=config.step_tokens,
            max_requests=config.step_requests,
            prefix_cache=config.prefix_cache,
            watermark=config.watermark,
            runner=runner,
        )
    except (MemoryError, RuntimeError) as error:
        if config.on_gpu:
            raise
        size = num_blocks * KvLayout.of(shape, dtype="float32").block_bytes / device.GIB
        raise StartupError(
            f"pool_blocks: {config.pool_blocks} KV blocks take up to {size:.1f} GiB of memory, which cannot be had"
        ) from error


def _told_now_and_then(event: str) -> Callable[[int, int], None]:
    """Logs progress, at most every few seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _TELL_S:
            last = time.monotonic()
            _log.info(event, done=done, total=total)

    return tell


def use_threads(config: WorkerConfig) -> None:
    """Gives the process its share of the cores; once, before anything computes."""
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    torch.set_num_interop_threads(1)


def use_kernels(config: WorkerConfig) -> None:
    """Takes the CPU kernels in C into use, where they are wanted and can be had; once, before anything computes."""
    if config.on_gpu or config.cpu_kernels == "torch":
        return
    match native.load(config.cache_dir / "kernels"):
        case native.Loaded(path, not_kept=None):
            _log.info("kernels in C are in use", path=str(path))
        case native.Loaded(not_kept=why):
            _log.warning("kernels in C are in use, and are compiled at each start", why=why)
        case native.Missing(why):
            _log.warning("decode steps are computed by torch alone, which is slower", why=why)


def _warm_up(engine: Engine, *, on_gpu: bool) -> None:
    """Runs prompts and decode steps, so that the first requests do not pay for lazy initialisation.

    Raises `NumericalError` where a step gives nothing usable. On a GPU each kind of sampling is compiled, in each form
    in which a number of requests is.
    """
    ways: list[dict[str, Any]] = [{"temperature": 0.0}]
    batches = [1]
    if on_gpu:
        ways += [{"temperature": 1.0}, {"top_k": 8}, {"top_p": 0.5}, {"top_k": 8, "top_p": 0.5}]
        batches += [2, 16]
    names = itertools.count()
    for batch, way in itertools.product(batches, ways):
        for _ in range(batch):
            lease = engine.try_reserve(2)
            assert lease is not None, "an empty pool has room for a few blocks"
            sampling = SamplingParams(max_tokens=2, ignore_eos=True, **way)
            engine.add(RequestId(f"warm-up-{next(names)}"), [0], sampling, lease=lease, root=None)
        while engine.has_work:
            for done in engine.step().progress:
                if done.error is not None:
                    raise done.error
    engine.stats = EngineStats()  # which are of requests
