"""A worker's device: whether it can be had, and how much of its memory is the KV pool's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.weights import Weights, nbytes
from paceline.errors import ConfigError, StartupError
from paceline.log import get_logger

_log = get_logger(__name__)

_MARGIN: Final = 512 * 2**20
"""Bytes that stay free: what libraries take late, and what fragments."""
_FEWEST_BLOCKS: Final = 16

GIB: Final = 2**30


def open_device(name: str) -> torch.device:
    """`cpu`, or the GPU `cuda:N`, made the process's current one. Raises `StartupError` that says what is missing."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if torch.version.cuda is None:
        raise StartupError(
            f"device {name}: this torch, {torch.__version__}, was built without CUDA: install one that has it"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise StartupError(f"device {name}: no GPU was found here, or its driver is too old: {_driver_fault()}")
    assert device.index is not None, "a GPU is named by its index"
    if device.index >= count:
        raise ConfigError(f"device {name}: there are {count} GPUs here, cuda:0 to cuda:{count - 1}")
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StartupError(f"device {name}: {error}") from error
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name_of = torch.cuda.get_device_name(device)
        raise StartupError(f"device {name}: {name_of} has compute capability {major}.{minor}, and 8.0 is needed")
    return device


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `StartupError` where the model alone is more than what is free."""
    if device.type == "cpu":
        return
    needed, (free, total) = nbytes(config, dtype), torch.cuda.mem_get_info(device)
    if needed + _MARGIN > free:
        raise StartupError(
            f"{config.name}: its weights take {needed / GIB:.1f} GiB as {_short(dtype)}, "
            f"and of the {total / GIB:.1f} GiB of {device} {free / GIB:.1f} are free"
        )


def create_runner(
    config: ModelConfig,
    weights: Weights,
    *,
    num_blocks: int | None,
    token_budget: int,
    max_requests: int,
    fraction: float,
    progress: Callable[[int, int], None] | None = None,
) -> GraphRunner:
    """A runner with its graphs captured, over a pool of `num_blocks`, or of what `fraction` of the GPU leaves for it.

    The largest step is run before, eagerly and on a small pool, to see what it takes beside the pool. Raises
    `StartupError` where too little is left.
    """
    device = weights.embed.device
    working = _working_bytes(config, weights, token_budget, max_requests)
    block_bytes = _block_bytes(config, weights)
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    # Graphs keep what they work with, and the eager path works beside them.
    available = min(math.floor(fraction * total) - own, free) - 2 * working - _MARGIN
    most = available // block_bytes
    wanted = most if num_blocks is None else num_blocks
    if max(wanted, _FEWEST_BLOCKS) > most:
        asked = max(wanted, _FEWEST_BLOCKS)
        raise StartupError(
            f"{device}: a pool of {asked} KV blocks takes {asked * block_bytes / GIB:.2f} GiB, "
            f"and {max(available, 0) / GIB:.2f} GiB are left "
            f"for it: {total / GIB:.1f} GiB in all, {free / GIB:.1f} free beside {own / GIB:.1f} for the weights, "
            f"memory_fraction {fraction}, {2 * working / GIB:.2f} for a step of {token_budget} tokens"
        )
    runner = GraphRunner(config, weights, num_blocks=wanted, token_budget=token_budget, max_requests=max_requests)
    runner.capture(progress)
    left = torch.cuda.mem_get_info(device)[0]
    _log.info(
        "memory planned",
        device=str(device),
        pool_blocks=wanted,
        pool_gib=round(wanted * block_bytes / GIB, 2),
        weights_gib=round(weights.nbytes / GIB, 2),
        step_gib=round(working / GIB, 2),
        left_gib=round(left / GIB, 2),
    )
    return runner


def _working_bytes(config: ModelConfig, weights: Weights, token_budget: int, max_requests: int) -> int:
    """What the largest step takes at its peak, beside weights and pool."""
    device = weights.embed.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner = GraphRunner(
        config, weights, num_blocks=_FEWEST_BLOCKS, token_budget=token_budget, max_requests=max_requests
    )
    runner.rehearse()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    return peak


def _block_bytes(config: ModelConfig, weights: Weights) -> int:
    one = GraphRunner.pool_shape(config, 1)
    return math.prod(one) * weights.embed.element_size()


def _driver_fault() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "the driver lists none"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
