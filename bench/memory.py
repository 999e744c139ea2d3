"""Memory in use: of each GPU, and of each process of a cluster."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from processes import tree


def device_memory() -> dict[str, int]:
    """MiB in use, by GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    return {index.strip(): int(used) for index, used in (line.split(",") for line in lines)}


def host_memory(root: int) -> dict[str, int]:
    """Resident MiB of a process and of each that descends from it, by its number and name."""
    found = {}
    for process in tree(root):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            resident = next((line for line in lines if line.startswith("VmRSS:")), "VmRSS: 0 kB")
            found[f"{process.pid} {process.name}"] = int(resident.split()[1]) // 1024
    return found
