"""How the benchmarks here time a device: calls captured once, replayed, and the median between events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 20, capture: bool = True) -> float:
    """The median time of `call` on the device, in seconds, after warming up; on a CPU that of one call.

    Captured, what a call launches follows without the host between; peer and host copies are timed without.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    with torch.cuda.device(device):
        run = _captured(call) if capture else _warm(call)
        run()
        events = [(event(), event()) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in events) / 1e3


def _warm(call: Callable[[], object]) -> Callable[[], object]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return call


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the call reads
    with torch.cuda.stream(stream):  # what kernels keep for a stream must be there before
        _warm(call)
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def event() -> torch.cuda.Event:
    """One that tells times."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
