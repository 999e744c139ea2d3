"""Whether a cluster gave everything back: blocks, device memory, host memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster import Cluster
from memory import device_memory, host_memory
from paceline.client import Loads
from report import Report

SETTLED_S = 10.0
DEVICE_MIB = 64
HOST_MIB = 200


@dataclass(frozen=True)
class InUse:
    """Memory in use at one moment, in MiB: by GPU, and by process of the cluster."""

    device: dict[str, int]
    host: dict[str, int]

    @classmethod
    def of(cls, cluster: Cluster) -> InUse:
        """Now."""
        return cls(device_memory(), host_memory(cluster.pid))


def check_leaks(report: Report, name: str, cluster: Cluster, since: InUse | None) -> None:
    """Once no request is left. `since`: when all sizes had been served once; None where nothing came after that."""
    loads = settled(cluster)
    report.equal(f"{name}: requests left", loads.queued + loads.active, 0)
    held = {each.key.worker_id: each.load.total_blocks - each.load.free_blocks for each in loads.workers}
    report.equal(f"{name}: blocks not given back", {worker: blocks for worker, blocks in held.items() if blocks}, {})
    if since is None:
        return
    now = InUse.of(cluster)
    for gpu, used in now.device.items():
        report.at_most(f"{name}: growth of GPU {gpu}", used - since.device[gpu], DEVICE_MIB, "MiB")
    grown = {process: used - since.host.get(process, used) for process, used in now.host.items()}
    process, most = max(grown.items(), key=lambda each: each[1])
    report.at_most(f"{name}: growth of a process at most ({process.partition(' ')[2]})", most, HOST_MIB, "MiB")


def check_device_memory_is_back(report: Report, name: str, before: dict[str, int]) -> None:
    """After a cluster has stopped. The driver takes a moment to free what a process had."""
    deadline = time.monotonic() + SETTLED_S
    while (grown := _grown(before)) > DEVICE_MIB and time.monotonic() < deadline:
        time.sleep(0.2)
    if before:
        report.at_most(f"{name}: device memory left behind", grown, DEVICE_MIB, "MiB")


def _grown(before: dict[str, int]) -> int:
    return max((used - before[gpu] for gpu, used in device_memory().items()), default=0)


def settled(cluster: Cluster) -> Loads:
    """The loads when nothing is left in hand, or as they are after `SETTLED_S`: a heart-beat tells of what is freed."""
    deadline = time.monotonic() + SETTLED_S
    with cluster.client() as client:
        while True:
            loads = client.loads()
            held = sum(worker.load.total_blocks - worker.load.free_blocks for worker in loads.workers)
            if not (held or loads.queued or loads.active) or time.monotonic() > deadline:
                return loads
            time.sleep(0.1)
