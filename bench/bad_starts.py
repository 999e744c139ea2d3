"""Processes that cannot start: broken model files, a port or an id in use, a full disk, no network."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.client import Loads
from paceline.testing.broken_models import broken_gguf, broken_safetensors
from paceline.testing.cluster import Cluster
from report import Report

START_S = 90.0
CANNOT_START = 2
"""Exit status of a process that says what to change."""


def run(report: Report, cluster: Cluster, folder: Path) -> None:
    """Every start that must fail; `cluster` is up, and has ports and ids in use."""
    (folder / "gguf").mkdir()
    (folder / "folders").mkdir()
    broken = [*broken_gguf(folder / "gguf"), *broken_safetensors(folder / "folders")]
    with ThreadPoolExecutor(max_workers=2) as threads:
        # The engine process reads the weights, so a worker is what has to refuse.
        ends = threads.map(lambda each: start("decode", f"--model={each.model}", folder=folder), broken)
        for each, end in zip(broken, ends, strict=True):
            show(report, f"model: {each.name}", end, *each.parts)
    in_use(report, cluster, folder)
    absent(report, folder)


def in_use(report: Report, cluster: Cluster, folder: Path) -> None:
    """What a running cluster has already."""
    with cluster.client() as client:
        loads: Loads = client.loads()
    ports = {
        "router": cluster.address.rpartition(":")[2],
        **{str(each.role.value): each.address.rpartition(":")[2] for each in loads.workers},
    }
    for role, port in ports.items():
        end = start(role, f"--port={port}", "--model=dummy:tiny", folder=folder)
        show(report, f"{role}: port in use", end, f":{port}", "another process")
    end = start("up", f"--port={ports['router']}", "--model=dummy:tiny", folder=folder)
    show(report, "up: port in use", end, ports["router"], "in use")
    run_dir = folder / "held"
    with Cluster.start(0, 1, run_dir=run_dir) as holder:
        [held] = run_dir.iterdir()
        flags = ("--model=dummy:tiny", "--worker-id=decode-0", f"--router={holder.address}", "--port=0")
        end = start("decode", *flags, f"--run-dir={held}", folder=folder)
    show(report, "decode: worker id in use", end, "'decode-0'", "in use", "10 s")


def absent(report: Report, folder: Path) -> None:
    """A model that is not here, and a disk that has no room for it."""
    cache = folder / "cache"
    end = start("decode", f"--cache-dir={cache}", "--offline", folder=folder)
    show(report, "model: offline and not cached", end, "smollm2-135m-instruct", "offline", str(cache))
    end = start("decode", "--model=/no/such/model.gguf", folder=folder)
    show(report, "model: no such file", end, "/no/such/model.gguf")
    end = start("decode", "--model=dummy:tiny", "--context-tokens=5000", folder=folder)
    show(report, "context_tokens over the model's", end, "context_tokens", "5000", "2048")
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], check=False, capture_output=True).returncode != 0:
        report.note("model: no room in the cache", "not tried: this machine allows no mount namespace")
        return
    disk = folder / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=8m tmpfs {shlex.quote(str(disk))} && exec "$@"'
    end = start("decode", f"--cache-dir={disk}", folder=folder, before=(unshare, "-rm", "sh", "-c", mount, "sh"))
    show(report, "model: no room in the cache", end, str(disk), "MB", "free")


def start(role: str, *flags: str, folder: Path, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a role that cannot start, to its end."""
    own = [] if any(flag.startswith("--run-dir") for flag in flags) else [f"--run-dir={folder / 'run'}"]
    own += [] if any(flag.startswith("--port") for flag in flags) else ["--port=0"]
    command = [*before, sys.executable, "-P", "-m", "paceline.cli", role, *own, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)


def show(report: Report, name: str, end: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Its status, and its last line, which is the error. No traceback may be about."""
    lines = (end.stderr or end.stdout).strip().splitlines() or [""]
    traceback = " (and a traceback)" if "Traceback" in end.stderr + end.stdout else ""
    report.contains(name, f"exit {end.returncode}{traceback}: {lines[-1]}", f"exit {CANNOT_START}: error: ", *parts)
