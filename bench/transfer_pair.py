"""A writer and a target of a transport, each with a pool of its own, and what a write between them takes."""

from __future__ import annotations

import multiprocessing
import random
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from paceline import kernels
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transfer import merge
from paceline.kvtransfer.transports import create
from paceline.kvtransfer.transports.cuda_ipc import CudaIpcTransport, block_pairs
from paceline.kvtransfer.transports.pool_memory import PoolMemory
from paceline.kvtransfer.transports.transport import Peer, Piece, Transport
from paceline.testing.host_memory import HostMemory
from paceline.types import BLOCK_TOKENS
from peer_pool import checksums

POLL_S = 200e-6
PAUSE_S = 0.002
"""Between writes: a target takes notifications in more slowly than a writer sends small ones, and would fall behind."""


@dataclass(frozen=True)
class Setup:
    """Two pools: on the first and the last GPU, or in host memory, where `cuda_ipc` copies by other means."""

    on_gpus: bool
    blocks: int
    block_bytes: int
    tokens: tuple[int, ...]  # of the prompts that are written
    repeats: int

    def pieces(self, tokens: int, *, churned: bool) -> list[Piece]:
        """What a prompt of so many tokens takes: one run, or single blocks all over both pools, merged as ever."""
        blocks = tokens // BLOCK_TOKENS
        if not churned:
            return merge(range(blocks), range(self.blocks - blocks, self.blocks))
        dice = random.Random(tokens)
        return merge(dice.sample(range(self.blocks), blocks), dice.sample(range(self.blocks), blocks))


GPUS = Setup(True, blocks=4096, block_bytes=2 << 20, tokens=(512, 1024, 4096, 32768), repeats=15)
"""8 GiB each; blocks as Llama-3-8B's in bfloat16."""
HOST = Setup(False, blocks=64, block_bytes=65536, tokens=(64, 512), repeats=2)


@dataclass(frozen=True)
class Timed:
    """Writes of the same blocks: seconds of each from the post on."""

    num_bytes: int
    posted: list[float]  # until `post` returned
    ended: list[float]  # until the writer knew that all is there
    seen: list[float]  # until the target had the notification
    moved: list[float]  # in which data moved, of those where the transport knows it

    @property
    def gigabytes_per_second(self) -> float:
        """Of the median write, as its writer sees it."""
        return self.num_bytes / statistics.median(self.ended) / 1e9

    def __str__(self) -> str:
        posted, ended, seen = (1e3 * statistics.median(each) for each in (self.posted, self.ended, self.seen))
        text = f"{self.gigabytes_per_second:.0f} GB/s, {ended:.3f} ms, posted after {posted:.3f}"
        if self.moved:
            moved = statistics.median(self.moved)
            text += f", moving for {1e3 * moved:.3f}"
            text += f" at {self.num_bytes / moved / 1e9:.0f} GB/s" if self.num_bytes and moved else ""
        return f"{text}; target told after {seen:.3f} ms"


class Target:
    """A process with a pool, which polls as a worker does that awaits a write."""

    def __init__(self, transport: str, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, transport, setup), daemon=True)
        self._process.start()
        theirs.close()  # else nobody would ever hear of the process's death
        self.metadata: bytes = self._pipe.recv()

    def arrivals(self) -> dict[bytes, float]:
        """When each notification became visible, in this machine's monotonic seconds."""
        self._pipe.send("arrivals")
        arrived: dict[bytes, float] = self._pipe.recv()
        return arrived

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Of what the blocks hold."""
        self._pipe.send(list(blocks))
        found: list[int] = self._pipe.recv()
        return found

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send("end")
        self._process.join(30)
        self._process.kill()


def _serve(pipe: Connection, name: str, setup: Setup) -> None:
    transport, pool, metadata = _station(name, setup, torch.cuda.device_count() - 1, _memory(setup))
    pipe.send(metadata)
    arrived: dict[bytes, float] = {}
    wake = [] if transport.wake_descriptor is None else [transport.wake_descriptor]
    while True:
        select.select(wake, [], [], POLL_S)
        for notification in transport.poll().notifications:
            arrived[notification.payload] = time.monotonic()
        if pipe.poll(0):
            asked = pipe.recv()
            if asked == "end":
                transport.close()
                return
            pipe.send(arrived if asked == "arrivals" else checksums(pool, asked))


def _memory(setup: Setup) -> PoolMemory:
    if not setup.on_gpus:
        return HostMemory()
    from paceline.kvtransfer.transports.cuda_memory import CudaMemory  # it needs the driver's bindings

    return CudaMemory()


def _station(name: str, setup: Setup, gpu: int, memory: PoolMemory) -> tuple[Transport, torch.Tensor, bytes]:
    size = (setup.blocks, setup.block_bytes)
    if setup.on_gpus:
        torch.cuda.set_device(gpu)
        pool = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{gpu}")
        torch.cuda.synchronize()
        region = Region(pool.data_ptr(), *size, "cuda", gpu)
    else:
        pool = torch.zeros(size, dtype=torch.uint8)
        region = Region(pool.data_ptr(), *size)
    transport: Transport = (
        CudaIpcTransport("bench", memory)
        if name == "cuda_ipc"
        else create(name, "bench", device="cuda" if setup.on_gpus else "cpu").transport
    )
    return transport, pool, transport.register(region)


class Writer:
    """A pool of noise, and its way to a target."""

    def __init__(self, name: str, target: Target, setup: Setup) -> None:
        self._memory = _memory(setup)
        self.transport, self._pool, _ = _station(name, setup, 0, self._memory)
        self._setup, self._target = setup, target
        self._peer: Peer = self.transport.connect(target.metadata)
        self._posted = 0
        self.renew()

    def renew(self) -> None:
        """Fills the pool with other noise, so that nothing of it is at the target yet."""
        self._pool.random_()
        if self._setup.on_gpus:
            torch.cuda.synchronize()

    def cut(self, cut: kernels.ScatterCut) -> None:
        """How copies over `cuda_ipc` are cut up from now on. Host memory has no programs."""
        if not isinstance(self._memory, HostMemory):
            self._memory.cut = cut  # type: ignore[attr-defined]

    def write(self, pieces: Sequence[Piece], repeats: int | None = None) -> Timed:
        """Writes the pieces so often, one write after the other, after two that are not counted."""
        began: dict[bytes, float] = {}
        posted: list[float] = []
        ended: list[float] = []
        moved: list[float] = []
        for _ in range((self._setup.repeats if repeats is None else repeats) + 2):
            self._posted += 1
            payload = b"%d" % self._posted
            began[payload] = time.monotonic()
            self.transport.post(self._peer, pieces, payload)
            posted.append(time.monotonic() - began[payload])
            while not (finished := self.transport.poll().finished):
                pass
            ended.append(time.monotonic() - began[payload])
            assert finished[0].ok, finished[0].error
            moved += [] if finished[0].seconds is None else [finished[0].seconds]
            time.sleep(PAUSE_S)
        arrived = self._wait_arrived(set(began))
        seen = [arrived[payload] - at for payload, at in began.items()]
        num_bytes = sum(piece.num_blocks for piece in pieces) * self._setup.block_bytes
        return Timed(num_bytes, posted[2:], ended[2:], seen[2:], moved[2:])

    def wrong(self, pieces: Sequence[Piece]) -> int:
        """Blocks that do not hold at the target what they hold here."""
        pairs = block_pairs(pieces)
        ours, theirs = checksums(self._pool, pairs[:, 0].tolist()), self._target.checksums(pairs[:, 1].tolist())
        return sum(here != there for here, there in zip(ours, theirs, strict=True))

    def keep_writing(self, pieces: Sequence[Piece], count: int) -> None:
        """Posts so many writes at once, and returns."""
        for _ in range(count):
            self.transport.post(self._peer, pieces, None)

    def finish(self, count: int) -> None:
        """Waits until so many writes have ended."""
        while count > 0:
            finished = self.transport.poll().finished
            assert all(each.ok for each in finished), finished
            count -= len(finished)

    def close(self) -> None:
        """Ends it."""
        self.transport.close()

    def _wait_arrived(self, payloads: set[bytes]) -> dict[bytes, float]:
        deadline = time.monotonic() + 30
        while not payloads <= set(arrived := self._target.arrivals()):
            self.transport.poll()
            assert time.monotonic() < deadline, "notifications are lost"
        return arrived
