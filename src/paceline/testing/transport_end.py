"""One end of a transport under test: a real pool and a transport, here or in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import create
from paceline.kvtransfer.transports.by_peer import ByPeerTransport
from paceline.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from paceline.kvtransfer.transports.loopback import Hub
from paceline.kvtransfer.transports.nixl import NixlTransport
from paceline.kvtransfer.transports.transport import Finished, Handle, Peer, Piece, Transport
from paceline.testing.host_memory import HostMemory

LIVENESS_S = 20.0
"""Seconds within which everything that a test waits for has happened, on a machine that is busy with other tests."""

GPU_KINDS = ("cuda_ipc", "cuda_ipc-one-gpu", "cuda_ipc-in-stream", "cuda-auto")
"""Ends that keep their pools on GPUs: writers on the first, targets on the last unless it is said otherwise."""

_ALIGNMENT = 64


def wait_until(condition: Callable[[], bool], what: str, *ends: End) -> None:
    """Polls the ends that live in this process until the condition holds; AssertionError after `LIVENESS_S`."""
    deadline = time.monotonic() + LIVENESS_S
    while True:
        for end in ends:
            end.turn()
        if condition():
            return
        assert time.monotonic() < deadline, f"{what} did not happen in {LIVENESS_S} s"
        time.sleep(0.0002)


class Pool(Protocol):
    """Blocks that a test writes and reads."""

    region: Region

    def write(self, block: int, contents: bytes) -> None:
        """Gives a block its contents."""
        ...

    def read(self, block: int) -> bytes:
        """A block's contents."""
        ...


class HostPool:
    """In host memory, with no library's help."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._memory = ctypes.create_string_buffer(num_blocks * block_bytes + _ALIGNMENT)
        address = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        self.region = Region(address, num_blocks, block_bytes)

    def write(self, block: int, contents: bytes) -> None:
        """See `Pool`."""
        ctypes.memmove(self.region.address_of(block), contents, len(contents))

    def read(self, block: int) -> bytes:
        """See `Pool`."""
        return ctypes.string_at(self.region.address_of(block), self.region.block_bytes)


class Station:
    """A pool and a transport over it, with everything it reported so far."""

    def __init__(self, pool: Pool, transport: Transport) -> None:
        self._pool = pool
        self._transport = transport
        self._metadata = transport.register(pool.region)
        self._peers: dict[str, Peer] = {}
        self._finished: list[Finished] = []
        self._notifications: list[tuple[bytes, dict[int, int]]] = []
        self._watched: tuple[int, ...] = ()
        self.polling = True

    def metadata(self) -> bytes:
        """What peers connect to."""
        return self._metadata

    def set_polling(self, polling: bool) -> None:
        """Whether `turn` polls."""
        self.polling = polling

    def turn(self) -> None:
        """Polls once. A notification is kept with the checksums that the watched blocks had when it became visible."""
        if self.polling:
            polled = self._transport.poll()
            self._finished += polled.finished
            for notification in polled.notifications:
                self._notifications.append((notification.payload, self.checksums(self._watched)))

    def connect(self, metadata: bytes) -> str:
        """Connects, and returns the peer's name."""
        peer = self._transport.connect(metadata)
        self._peers[peer.name] = peer
        return peer.name

    def post(
        self,
        peer: str,
        pieces: Sequence[tuple[int, int, int]],
        notification: bytes | None,
        *,
        in_stream: bool = False,
    ) -> int:
        """Posts (source block, target block, number of blocks), and returns the handle's number."""
        of = [Piece(*piece) for piece in pieces]
        return self._transport.post(self._peers[peer], of, notification, in_stream=in_stream).number

    def release(self, peer: str) -> None:
        """Releases a peer."""
        self._transport.release(self._peers[peer])

    def finished(self) -> dict[int, str | None]:
        """The terminal handles' numbers and errors; AssertionError where one was reported twice."""
        by_number = {each.handle: each.error for each in self._finished}
        assert len(by_number) == len(self._finished), "a handle became terminal twice"
        return {handle.number: error for handle, error in by_number.items()}

    def notifications(self) -> list[tuple[bytes, dict[int, int]]]:
        """What arrived, with the watched blocks' checksums at that moment."""
        return self._notifications

    def watch(self, blocks: Sequence[int]) -> None:
        """Whose checksums later notifications are kept with."""
        self._watched = tuple(blocks)

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Gives each block contents of its own: a function of the seed and the block."""
        for block in blocks:
            self._pool.write(block, pattern(seed, block, self._pool.region.block_bytes))

    def checksums(self, blocks: Sequence[int]) -> dict[int, int]:
        """CRC-32 of each block."""
        return {block: zlib.crc32(self.read(block)) for block in blocks}

    def read(self, block: int) -> bytes:
        """A block's bytes."""
        return self._pool.read(block)

    def cpu_seconds_asleep(self, seconds: float) -> float:
        """CPU time that all of the process's threads take while this one sleeps."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def describe(self) -> str:
        """The transport's repr."""
        return repr(self._transport)

    def close(self) -> None:
        """Closes the transport."""
        self._transport.close()


def pattern(seed: int, block: int, block_bytes: int) -> bytes:
    """What `fill` writes: no two blocks of one seed are equal, nor two seeds of one block."""
    unit = seed.to_bytes(4, "little") + block.to_bytes(4, "little")
    return (unit * (block_bytes // len(unit) + 1))[:block_bytes]


class End(Protocol):
    """A station, near or far. `call` runs one of its methods."""

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result, or its exception."""
        ...

    def turn(self) -> None:
        """Polls, where it does not do so by itself."""
        ...

    def close(self) -> None:
        """Ends it in order; fine after `kill`."""
        ...


class LocalEnd:
    """A station of this process."""

    def __init__(self, kind: str, name: str, num_blocks: int, block_bytes: int, hub: Hub | None = None) -> None:
        self.transport = create(kind, name, hub=hub).transport
        self.station = Station(HostPool(num_blocks, block_bytes), self.transport)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls it."""
        return getattr(self.station, method)(*arguments)

    def turn(self) -> None:
        """Polls."""
        self.station.turn()

    def close(self) -> None:
        """Closes the transport."""
        self.station.close()


class ProcessEnd:
    """A station in a process of its own, that polls all the time."""

    def __init__(self, kind: str, name: str, num_blocks: int, block_bytes: int, environment: Mapping[str, str]) -> None:
        # Forked by a server that has imported nixl, and so torch, but has made no agent: seconds a process, saved.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "nixl._api"])
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, kind, name, num_blocks, block_bytes, dict(environment))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls it over the pipe."""
        self.begin(method, *arguments)
        return self.result()

    def begin(self, method: str, *arguments: Any) -> None:
        """Sends the call only: a stopped process will find it when it goes on."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """The answer to the oldest call that was begun."""
        assert self._pipe.poll(3 * LIVENESS_S), "the process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def turn(self) -> None:
        """It polls by itself."""

    def stop(self) -> None:
        """SIGSTOP, in force on return."""
        self._signal(signal.SIGSTOP)
        status = Path(f"/proc/{self._pid}/stat")
        wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the stop of a process")

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and reaped on return."""
        self._signal(signal.SIGKILL)
        self._process.join(LIVENESS_S)

    def close(self) -> None:
        """Asks it to end, kills it if it does not."""
        if self._process.is_alive():
            self._pipe.send(("close", ()))
            self._process.join(LIVENESS_S / 4)
            if self._process.is_alive():
                self.kill()
        self._process.close()
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None, "started in __init__"
        return self._process.pid

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)


def _station(kind: str, name: str, num_blocks: int, block_bytes: int) -> Station:
    """A process's station, by the kind of its transport."""
    if kind in GPU_KINDS:
        from paceline.testing.cuda_station import CudaStation  # here for its torch, which others need not wait for

        return CudaStation(kind, name, num_blocks, block_bytes)
    made: Transport
    if kind == "ipc-on-host":
        made = CudaIpcTransport(name, HostMemory())
    elif kind == "by-peer":
        made = ByPeerTransport({"ipc-on-host": CudaIpcTransport(name, HostMemory()), "nixl": NixlTransport(name)})
    else:
        made = create("ucxx" if kind == "ucxx" else "nixl", name).transport
    return Station(HostPool(num_blocks, block_bytes), made)


def _serve(
    pipe: Connection, kind: str, name: str, num_blocks: int, block_bytes: int, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    station = _station(kind, name, num_blocks, block_bytes)
    while True:
        if pipe.poll(0.0001):
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return  # the test is gone
            try:
                answer = getattr(station, method)(*arguments)
            except (PacelineError, ValueError, AssertionError) as error:
                answer = error
            if method == "close":
                return
            pipe.send(answer)
        station.turn()


__all__ = ["GPU_KINDS", "LIVENESS_S", "End", "Handle", "LocalEnd", "ProcessEnd", "Station", "pattern", "wait_until"]
