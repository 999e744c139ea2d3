"""What KV bandwidth several writers get into one pool, and one writer into several, as tiers of unequal size have it.

`2x1` is two writers into one pool, `1x3` one writer into three. Each is a process with a pool of its own; all write at
once, prompts of scattered blocks as into a churned pool, each into a part of its own of every target's pool. When it is
over, each target looks whether every block holds what its writer had. Targets take the last devices and writers the
first, so that all bytes cross a link; on two GPUs the processes of a side share one.

    python bench/transfer_fan.py --devices cuda:0,cuda:1,cuda:2,cuda:3
    python bench/transfer_fan.py --devices cuda:0,cuda:1 --cases 1x1,2x1,1x2
    python bench/transfer_fan.py          # on the CPU, over shared memory
"""

from __future__ import annotations

import argparse
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from gpu_timing import seconds
from gpus import require
from paceline.kvtransfer.region import DeviceKind, Region
from paceline.kvtransfer.transfer import merge
from paceline.kvtransfer.transports import create
from paceline.kvtransfer.transports.transport import Handle, Peer, Piece, Transport
from report import Report
from spawned import PATIENCE_S, Process

POLL_S = 200e-6
WARM_S = 0.5
"""Of writing, before it counts."""
FAIR = 0.9
"""Of what one writer moves into one pool, that several move together at least: sharing a link loses little of it."""


@dataclass(frozen=True)
class Pool:
    """A pool's size, and the transport over it."""

    transport: str
    blocks: int
    block_bytes: int
    prompt_blocks: int  # of one write

    def turn(self, writer: Place) -> int:
        """Writes until each block of a writer's part was written once."""
        return -(-len(writer.part(self.blocks)) // self.prompt_blocks)


@dataclass(frozen=True)
class Place:
    """Which writer of how many, on which device; or which target."""

    number: int
    of: int
    device: str

    def part(self, blocks: int) -> range:
        """The blocks of a target's pool that are this writer's."""
        each = blocks // self.of
        return range(self.number * each, (self.number + 1) * each)

    @property
    def mark(self) -> int:
        """What this writer's bytes are."""
        return self.number + 1


@dataclass(frozen=True)
class Wrote:
    """What a writer did: how many of its writes failed, and bytes by the moment, in monotonic seconds."""

    failed: int
    finished: tuple[tuple[float, int], ...]


@dataclass(eq=False)
class Way:
    """From a writer to one of its targets."""

    peer: Peer
    prompts: Iterator[list[Piece]]
    turn: int  # writes that reach each block
    posted: int = 0


def serve(pipe: Connection, pool: Pool, place: Place) -> None:
    """A target: polls as a worker does that awaits writes, until it is asked what came."""
    transport, memory, metadata = station(pool, place, fill=0)
    pipe.send(metadata)
    wake = [] if transport.wake_descriptor is None else [transport.wake_descriptor]
    notified = 0
    while not pipe.poll(0):
        select.select(wake, [], [], POLL_S)
        notified += len(transport.poll().notifications)
    try:
        writers = pipe.recv()
    except EOFError:
        return
    deadline = time.monotonic() + PATIENCE_S
    while notified < sum(posted for _, posted in writers) and time.monotonic() < deadline:
        notified += len(transport.poll().notifications)
    wrong = sum(int((memory[writer.part(pool.blocks)] != writer.mark).any(dim=1).sum()) for writer, _ in writers)
    pipe.send((notified, wrong))
    _await_end(pipe)
    transport.close()


def write(pipe: Connection, pool: Pool, place: Place, targets: Sequence[bytes], outstanding: int) -> None:
    """A writer: `outstanding` writes to each target at any moment, from a moment on, for so long.

    It goes on until each block of its part of each pool was written, for the targets look at all of them.
    """
    transport, _memory, _ = station(pool, place, fill=place.mark)
    ways = [Way(transport.connect(metadata), prompts_of(pool, place), pool.turn(place)) for metadata in targets]
    under_way: dict[Handle, tuple[Way, int]] = {}

    def post(way: Way) -> None:
        pieces = next(way.prompts)
        way.posted += 1
        under_way[transport.post(way.peer, pieces, b"w")] = way, sum(piece.num_blocks for piece in pieces)

    for way in ways:  # the first ones compile what copies
        post(way)
    while under_way:
        for done in transport.poll().finished:
            del under_way[done.handle]
    pipe.send(None)
    start, end = pipe.recv()
    while time.monotonic() < start:
        pass
    for _ in range(outstanding):
        for way in ways:
            post(way)
    finished: list[tuple[float, int]] = []
    failed = 0
    while under_way:
        for done in transport.poll().finished:
            way, blocks = under_way.pop(done.handle)
            now = time.monotonic()
            finished.append((now, blocks * pool.block_bytes))
            failed += not done.ok
            if now < end or way.posted < way.turn:
                post(way)
    pipe.send((Wrote(failed, tuple(finished)), [way.posted for way in ways]))
    _await_end(pipe)
    transport.close()


def _await_end(pipe: Connection) -> None:
    """The other side closes the pipe when all are done: until then peers may look at this process's memory."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        return


def station(pool: Pool, place: Place, *, fill: int) -> tuple[Transport, torch.Tensor, bytes]:
    """A pool on a device, and a transport over it."""
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = torch.full((pool.blocks, pool.block_bytes), fill, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    name = f"fan-{'target' if fill == 0 else 'writer'}-{place.number}"
    transport = create(pool.transport, name, device=kind).transport
    region = Region(memory.data_ptr(), pool.blocks, pool.block_bytes, device=kind, device_index=device.index or 0)
    return transport, memory, transport.register(region)


def prompts_of(pool: Pool, place: Place) -> Iterator[list[Piece]]:
    """Blocks from all over the writer's pool to those of its part of a target's: turn after turn, each once a turn."""
    dice = random.Random(place.number)
    part = place.part(pool.blocks)
    while True:
        order = dice.sample(part, len(part))
        for begin in range(0, len(order), pool.prompt_blocks):
            chosen = order[begin : begin + pool.prompt_blocks]
            yield merge(dice.sample(range(pool.blocks), len(chosen)), chosen)


def seats(devices: Sequence[str], writers: int, targets: int) -> tuple[list[str], list[str]]:
    """The devices of writers and of targets: of both sides' own where there is more than one device."""
    last = list(devices[-min(targets, max(1, len(devices) - 1)) :])
    first = list(devices[: max(1, len(devices) - len(last))])
    return [first[number % len(first)] for number in range(writers)], [last[n % len(last)] for n in range(targets)]


def measure(
    report: Report, pool: Pool, devices: Sequence[str], writers: int, targets: int, *, seconds: float, outstanding: int
) -> float:
    """GB/s of all writers together into all targets."""
    from_devices, to_devices = seats(devices, writers, targets)
    sources = [Place(number, writers, device) for number, device in enumerate(from_devices)]
    name = f"{pool.transport}, {writers}x{targets}"
    with ExitStack() as stack:
        serving = [
            stack.enter_context(Process(serve, pool, Place(number, targets, device)))
            for number, device in enumerate(to_devices)
        ]
        metadata = [target.hear() for target in serving]
        writing = [stack.enter_context(Process(write, pool, source, metadata, outstanding)) for source in sources]
        for writer in writing:
            writer.hear()
        start = time.monotonic() + 0.05
        end = start + WARM_S + seconds
        for writer in writing:
            writer.tell((start, end))
        said = [writer.hear() for writer in writing]
        for number, target in enumerate(serving):
            target.tell([(source, posted[number]) for source, (_, posted) in zip(sources, said, strict=True)])
        came = [target.hear() for target in serving]
    wrote: list[Wrote] = [each for each, _ in said]
    rates = [
        sum(amount for at, amount in each.finished if start + WARM_S <= at <= end) / seconds / 1e9 for each in wrote
    ]
    shares = ", ".join(f"{rate:.3g}" for rate in rates)
    report.note(f"{name}: {' '.join(from_devices)} to {' '.join(to_devices)}", f"{sum(rates):.3g} GB/s ({shares})")
    report.equal(f"{name}: failed writes", sum(each.failed for each in wrote), 0)
    posts = [sum(each[1][number] for each in said) for number in range(targets)]
    report.equal(f"{name}: notifications at each target", [notified for notified, _ in came], posts)
    report.equal(f"{name}: blocks that hold other bytes", sum(wrong for _, wrong in came), 0)
    return sum(rates)


def plain_copy(pool: Pool, devices: Sequence[str]) -> float:
    """GB/s of copies of as many bytes from the first device to the last, by one process."""
    size = pool.prompt_blocks * pool.block_bytes
    source = torch.zeros(size, dtype=torch.uint8, device=devices[0])
    target = torch.zeros(size, dtype=torch.uint8, device=devices[-1])
    return size / seconds(lambda: target.copy_(source), source.device, capture=False) / 1e9


def main() -> int:
    """Measures each case; the exit code says whether all bytes arrived, and several did no worse than one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu", help="cpu, or cuda:0,cuda:1,...")
    parser.add_argument("--transport", default=None, help="default cuda_ipc, on the CPU nixl")
    parser.add_argument("--cases", default="1x1,2x1,1x2,1x3,3x1", help="writers x targets, the first to compare with")
    parser.add_argument("--seconds", type=float, default=2.0, help="of writing in each case")
    parser.add_argument("--prompt-blocks", type=int, default=256, help="of one write; 256 are 4,096 tokens")
    parser.add_argument("--outstanding", type=int, default=4, help="writes under way from each writer to each target")
    arguments = parser.parse_args()
    devices = arguments.devices.split(",")
    require(*devices)
    on_gpu = devices != ["cpu"]
    # As Llama-3-8B's in bfloat16; on a CPU as SmolLM2's in float32, and few of them.
    blocks, block_bytes, prompt_blocks = (
        (4096, 2 << 20, arguments.prompt_blocks) if on_gpu else (256, 737_280, min(16, arguments.prompt_blocks))
    )
    pool = Pool(arguments.transport or ("cuda_ipc" if on_gpu else "nixl"), blocks, block_bytes, prompt_blocks)
    report = Report("transfer-fan")
    with report:
        report.note(f"plain copy, {devices[0]} to {devices[-1]}", f"{plain_copy(pool, devices):.3g} GB/s")
        first: float | None = None
        for case in arguments.cases.split(","):
            writers, targets = map(int, case.split("x"))
            rate = measure(
                report,
                pool,
                devices,
                writers,
                targets,
                seconds=arguments.seconds,
                outstanding=arguments.outstanding,
            )
            if first is None:
                first = rate
            elif len(set(devices)) > 1:  # within one device there is no link to share, but memory and turns at it
                report.at_least(f"{pool.transport}, {case}: of {arguments.cases.partition(',')[0]}", rate / first, FAIR)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
