"""How fast each transport moves KV from one GPU to another, beside a plain copy between the two in the same run.

Blocks of 2 MiB, as Llama-3-8B's in bfloat16, of pools of their own in two processes: `run` writes neighbours to
neighbours, as into a fresh pool, `churned` writes random blocks to random blocks. Needs two GPUs.

    python bench/transfer.py [--transports cuda_ipc,nixl,ucxx] [--programs 16,32,64,132]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import select
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from gpu_timing import seconds
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transfer import merge
from paceline.kvtransfer.transports import create, cuda_ipc, nixl, ucxx
from paceline.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from paceline.kvtransfer.transports.cuda_memory import PROGRAMS, CudaMemory
from paceline.kvtransfer.transports.transport import Peer, Piece, Transport
from paceline.types import BLOCK_TOKENS
from report import Report

BLOCK_BYTES = 2 << 20
BLOCKS = 4096  # 8 GiB
TOKENS = (512, 4096, 32768)
REPEATS = 15
SHARE = 0.8
"""Least share of the plain copy's bandwidth, for the longest prompt over cuda_ipc."""
SEEN_S = 0.0002
"""Most that a target may take to see a notification, of the median, when it polls as a worker does."""
POLL_S = 200e-6
PAUSE_S = 0.002
"""Between writes: a target takes notifications in more slowly than a writer sends small ones, and would fall behind."""
AVAILABLE = {"cuda_ipc": cuda_ipc.available, "nixl": nixl.available, "ucxx": ucxx.available}


@dataclass(frozen=True)
class Timed:
    """Writes of the same blocks: seconds of each from the post on."""

    num_bytes: int
    ended: list[float]  # until the writer knew that all is there
    seen: list[float]  # until the target had the notification

    @property
    def gigabytes_per_second(self) -> float:
        """Of the median write, as its writer sees it."""
        return self.num_bytes / statistics.median(self.ended) / 1e9

    def __str__(self) -> str:
        ended, seen = statistics.median(self.ended), statistics.median(self.seen)
        return f"{self.gigabytes_per_second:.0f} GB/s, {ended * 1e3:.3f} ms; target told after {seen * 1e3:.3f} ms"


class Target:
    """A process with a pool on the last GPU, which polls as a worker does that awaits a write."""

    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, transport), daemon=True)
        self._process.start()
        theirs.close()  # else nobody would ever hear of the process's death
        self.metadata: bytes = self._pipe.recv()

    def arrivals(self) -> dict[bytes, float]:
        """When each notification became visible, in this machine's monotonic seconds."""
        self._pipe.send("arrivals")
        arrived: dict[bytes, float] = self._pipe.recv()
        return arrived

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send("end")
        self._process.join(30)
        self._process.kill()


def _serve(pipe: Connection, name: str) -> None:
    transport, _pool, metadata = _station(name, torch.cuda.device_count() - 1, PROGRAMS)
    pipe.send(metadata)
    arrived: dict[bytes, float] = {}
    wake = [] if transport.wake_descriptor is None else [transport.wake_descriptor]
    while True:
        select.select(wake, [], [], POLL_S)
        for notification in transport.poll().notifications:
            arrived[notification.payload] = time.monotonic()
        if pipe.poll(0):
            if pipe.recv() == "end":
                transport.close()
                return
            pipe.send(arrived)


def _station(name: str, gpu: int, programs: int) -> tuple[Transport, torch.Tensor, bytes]:
    torch.cuda.set_device(gpu)
    pool = torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
    torch.cuda.synchronize()
    transport: Transport = (
        CudaIpcTransport("bench", CudaMemory(programs=programs))
        if name == "cuda_ipc"
        else create(name, "bench", device="cuda").transport
    )
    return transport, pool, transport.register(Region(pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cuda", gpu))


class Writer:
    """A pool on the first GPU, and its way to a target."""

    def __init__(self, name: str, target: Target, programs: int = PROGRAMS) -> None:
        self.transport, self._pool, _ = _station(name, 0, programs)
        self._target = target
        self._peer: Peer = self.transport.connect(target.metadata)
        self._posted = 0

    def write(self, pieces: list[Piece], repeats: int = REPEATS) -> Timed:
        """Writes the pieces so often, one write after the other, after two that are not counted."""
        began: dict[bytes, float] = {}
        ended: list[float] = []
        for _ in range(repeats + 2):
            self._posted += 1
            payload = b"%d" % self._posted
            began[payload] = time.monotonic()
            self.transport.post(self._peer, pieces, payload)
            while not (finished := self.transport.poll().finished):
                pass
            ended.append(time.monotonic() - began[payload])
            assert finished[0].ok, finished[0].error
            time.sleep(PAUSE_S)
        arrived = self._wait_arrived(set(began))
        seen = [arrived[payload] - at for payload, at in began.items()]
        return Timed(sum(piece.num_blocks for piece in pieces) * BLOCK_BYTES, ended[2:], seen[2:])

    def keep_writing(self, pieces: list[Piece], count: int) -> None:
        """Posts so many writes at once, and returns."""
        for _ in range(count):
            self.transport.post(self._peer, pieces, None)

    def finish(self) -> None:
        """Waits until nothing is under way."""
        torch.cuda.synchronize(0)
        self.transport.poll()

    def close(self) -> None:
        """Ends it."""
        self.transport.close()

    def _wait_arrived(self, payloads: set[bytes]) -> dict[bytes, float]:
        deadline = time.monotonic() + 30
        while not payloads <= set(arrived := self._target.arrivals()):
            self.transport.poll()
            assert time.monotonic() < deadline, "notifications are lost"
        return arrived


def pieces_of(tokens: int, *, churned: bool) -> list[Piece]:
    """What a prompt of so many tokens takes: one run, or single blocks all over both pools, merged as ever."""
    blocks = tokens // BLOCK_TOKENS
    if not churned:
        return merge(range(blocks), range(BLOCKS - blocks, BLOCKS))
    dice = random.Random(tokens)
    return merge(dice.sample(range(BLOCKS), blocks), dice.sample(range(BLOCKS), blocks))


def plain_copy(num_bytes: int) -> float:
    """Bytes a second of a copy between the first and the last GPU by one process: the median of several."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")
    return num_bytes / seconds(lambda: target.copy_(source), source.device, capture=False)


def measure(report: Report, name: str, floors: dict[int, float]) -> None:
    """One transport over all lengths and both shapes of pools."""
    with closing(Target(name)) as target, closing(Writer(name, target)) as writer:
        for tokens in TOKENS:
            for churned in (False, True):
                timed = writer.write(pieces_of(tokens, churned=churned))
                label = f"{name}, {tokens} tokens, {'churned' if churned else 'run'}"
                share = timed.gigabytes_per_second / floors[tokens]
                report.note(label, f"{timed}; {share:.2f} of a plain copy")
                if name == "cuda_ipc" and tokens == max(TOKENS):
                    report.at_least(f"{label}: share of a plain copy", share, SHARE)
        bare = writer.write([], repeats=200)
        report.note(f"{name}, notification alone", f"target told after {statistics.median(bare.seen) * 1e3:.3f} ms")
        if name == "cuda_ipc":
            one = writer.write([Piece(0, 0, 1)], repeats=200)
            later = statistics.median(seen - ended for seen, ended in zip(one.seen, one.ended, strict=True))
            report.note(f"{name}, one block", one)
            report.at_most(f"{name}: a target sees after its writer knows", later * 1e6, SEEN_S * 1e6, "us")


def sweep(report: Report, all_programs: list[int]) -> None:
    """What more programs of the copying kernel gain, and what they take from a matrix product beside them."""
    left = torch.randn(8192, 8192, device="cuda:0").bfloat16()
    right = torch.randn(8192, 8192, device="cuda:0").bfloat16()
    product = torch.empty_like(left)
    alone = seconds(lambda: torch.mm(left, right, out=product), left.device, capture=False)
    report.note("matrix product of 8,192 x 8,192 alone", f"{alone * 1e3:.3f} ms")
    for programs in all_programs:
        with closing(Target("cuda_ipc")) as target, closing(Writer("cuda_ipc", target, programs)) as writer:
            timed = writer.write(pieces_of(max(TOKENS), churned=True))
            writer.keep_writing(pieces_of(max(TOKENS), churned=True), 20)
            beside = seconds(lambda: torch.mm(left, right, out=product), left.device, capture=False)
            writer.finish()
        report.note(f"{programs} programs", f"{timed}; the matrix product beside it {beside * 1e3:.3f} ms")


def main() -> int:
    """Measures what was asked for; the exit code says whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports", default=",".join(AVAILABLE), help="which, by name; those that are not here are named"
    )
    parser.add_argument("--programs", default="", help="numbers of programs to compare, such as 16,32,64,132")
    arguments = parser.parse_args()
    report = Report("transfer")
    if torch.cuda.device_count() < 2:
        print("transfer needs two GPUs", file=sys.stderr)
        return 2
    floors: dict[int, float] = {}
    for tokens in TOKENS:
        floors[tokens] = plain_copy(tokens // BLOCK_TOKENS * BLOCK_BYTES) / 1e9
        report.note(f"plain copy, {tokens} tokens", f"{floors[tokens]:.0f} GB/s")
    for name in arguments.transports.split(","):
        reason = AVAILABLE[name]()
        if reason is not None:
            report.note(name, f"not here: {reason}")
            continue
        measure(report, name, floors)
    if arguments.programs:
        sweep(report, [int(number) for number in arguments.programs.split(",")])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
