"""The `cuda_ipc` transport between real pools of gigabytes on two GPUs, and what is left when either side is killed.

The rules that hold for every transport are tried in tests/contract, on GPUs too where there are some.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.testing.transport_end import ProcessEnd, wait_until

BLOCK_BYTES = 2 << 20  # Llama-3-8B in bfloat16
BLOCKS = 2048
POOL_MIB = BLOCKS * BLOCK_BYTES >> 20
KILLS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


class Ends:
    """Processes of a test, ended with it."""

    def __init__(self) -> None:
        self._made: list[ProcessEnd] = []

    def make(self, name: str, *, kind: str = "cuda_ipc", blocks: int = BLOCKS, gpus: str | None = None) -> ProcessEnd:
        """A process of one side; `gpus` are those that it sees, by default all."""
        end = ProcessEnd(kind, name, blocks, BLOCK_BYTES, {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        self._made.append(end)
        return end

    def close(self) -> None:
        for end in self._made:
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    try:
        yield made
    finally:
        made.close()


def wait_finished(writer: ProcessEnd, *handles: int) -> list[str | None]:
    wait_until(lambda: set(handles) <= set(writer.call("finished")), "the end of the writes")
    finished = writer.call("finished")
    return [finished[handle] for handle in handles]


def wait_notified(target: ProcessEnd, payload: bytes) -> dict[int, int]:
    """The checksums of the watched blocks when the notification became visible."""
    wait_until(lambda: payload in dict(target.call("notifications")), "the arrival of a notification")
    seen: dict[int, int] = dict(target.call("notifications"))[payload]
    return seen


def used_mib(gpu: int) -> int:
    """Memory in use on a GPU, by all processes, without a context of ours there."""
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def scattered(blocks: int, seed: int, of: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Places for blocks 0, 1, ... all over a pool of so many, and the pieces that write them there."""
    places = random.Random(seed).sample(range(of), blocks)
    return places, [(block, place, 1) for block, place in enumerate(places)]


def assert_serves(writer: ProcessEnd, target: ProcessEnd, peer: str, seed: int) -> None:
    """A scattered write of a hundred blocks arrives."""
    blocks = list(range(100))
    places, pieces = scattered(len(blocks), seed, BLOCKS)
    payload = b"serves %d" % seed
    handle = writer.call("dye_and_post", blocks, seed, peer, pieces, payload)
    assert wait_finished(writer, handle) == [None]
    wait_notified(target, payload)
    assert target.call("not_dyed", places, seed, blocks) == []


@pytest.mark.parametrize(
    ("kind", "writers_gpus", "targets_gpus"),
    [
        ("cuda_ipc", None, None),
        ("cuda_ipc", "0", "1"),
        ("cuda_ipc-one-gpu", None, None),
        ("cuda-auto", None, None),
    ],
    ids=["two GPUs", "two GPUs of which each process sees its own", "one GPU", "auto"],
)
def test_every_block_of_a_pool_arrives_where_it_was_sent(
    ends: Ends, kind: str, writers_gpus: str | None, targets_gpus: str | None
) -> None:
    writer = ends.make("writer", kind=kind, gpus=writers_gpus)
    target = ends.make("target", kind=kind, gpus=targets_gpus)
    peer = writer.call("connect", target.call("metadata"))
    assert peer.startswith("cuda_ipc:target#" if kind == "cuda-auto" else "target#")
    everything = list(range(BLOCKS))
    places, pieces = scattered(BLOCKS, 1, BLOCKS)
    target.call("dye", everything, 5)
    handle = writer.call("dye_and_post", everything, 6, peer, pieces, b"all")
    assert wait_finished(writer, handle) == [None]
    wait_notified(target, b"all")
    assert target.call("not_dyed", places, 6, everything) == []


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_ipc-in-stream"])
def test_what_a_target_reads_after_the_notification_is_what_was_written_before(ends: Ends, kind: str) -> None:
    """Again and again into the same blocks. In stream order they are posted while they are computed."""
    writer, target = ends.make("writer", kind=kind, blocks=64), ends.make("target", kind=kind, blocks=64)
    peer = writer.call("connect", target.call("metadata"))
    sources = list(range(8))
    for number in range(200):
        places, pieces = scattered(len(sources), number, 64)
        target.call("watch", places)
        payload = b"round %d" % number
        handle = writer.call("dye_and_post", sources, number, peer, pieces, payload)
        seen, sent = wait_notified(target, payload), writer.call("checksums", sources)
        assert [seen[place] for place in places] == [sent[source] for source in sources]
        assert wait_finished(writer, handle) == [None]


def test_many_small_posts_at_once_end_once_each(ends: Ends) -> None:
    writer, target = ends.make("writer", blocks=256), ends.make("target", blocks=256)
    peer = writer.call("connect", target.call("metadata"))
    writer.call("dye", [3], 9)
    for number in range(1, 4):  # from the second time on, tables are used again
        handles = writer.call("post_often", 1000, peer, [(3, 200, 1)])
        assert set(wait_finished(writer, *handles)) == {None}
        wait_until(lambda: len(target.call("notifications")) == 1000 * number, "the arrival of all")  # noqa: B023
    assert target.call("not_dyed", [200], 9, [3]) == []


def test_a_killed_target_leaves_its_writer_serving_and_its_memory_free(ends: Ends) -> None:
    gpu = torch.cuda.device_count() - 1
    before = used_mib(gpu)
    writer = ends.make("writer")
    for number in range(KILLS):
        target = ends.make("target")
        peer = writer.call("connect", target.call("metadata"))
        assert_serves(writer, target, peer, number)
        assert used_mib(gpu) > before + POOL_MIB
        handles = writer.call("post_often", 200, peer, [(0, 0, BLOCKS // 2)])  # 400 GiB: a second and more
        assert not set(handles) <= set(writer.call("finished")), "writes must be in flight for this to mean anything"
        target.kill()
        assert all(error is None or "gone" in error for error in wait_finished(writer, *handles))
        # The socket broke with the process: nothing else told the writer, and nobody has released the peer.
        wait_until(lambda: used_mib(gpu) < before + POOL_MIB // 2, f"the return of {POOL_MIB} MiB on GPU {gpu}")
        writer.call("release", peer)
    target = ends.make("target")
    assert_serves(writer, target, writer.call("connect", target.call("metadata")), KILLS)


def test_a_killed_writer_writes_no_more_and_its_target_takes_the_next(ends: Ends) -> None:
    before = used_mib(0)
    target = ends.make("target")
    everything = list(range(BLOCKS))
    for number in range(KILLS):
        writer = ends.make("writer")
        peer = writer.call("connect", target.call("metadata"))
        assert_serves(writer, target, peer, number)
        handles = writer.call("post_often", 200, peer, [(0, 0, BLOCKS // 2)])
        assert not set(handles) <= set(writer.call("finished")), "writes must be in flight for this to mean anything"
        writer.kill()
        target.call("dye", everything, 77)
        time.sleep(0.3)
        # Not a byte came after the writer was reaped: its death is proof enough to use its blocks again.
        assert target.call("not_dyed", everything, 77, everything) == []
        wait_until(lambda: used_mib(0) < before + POOL_MIB // 2, f"the return of {POOL_MIB} MiB on GPU 0")


def test_a_stopped_target_delays_no_write(ends: Ends) -> None:
    writer, target = ends.make("writer", blocks=64), ends.make("target", blocks=64)
    peer = writer.call("connect", target.call("metadata"))
    target.stop()
    handle = writer.call("dye_and_post", [1], 3, peer, [(1, 2, 1)], b"while stopped")
    assert wait_finished(writer, handle) == [None]
    target.resume()
    wait_notified(target, b"while stopped")
    assert target.call("not_dyed", [2], 3, [1]) == []


def test_memory_that_cannot_be_exported_is_refused_with_what_to_change() -> None:
    program = """
from paceline.errors import StartupError
from paceline.testing.cuda_station import CudaStation
try:
    CudaStation("cuda_ipc", "writer", 16, 2 << 20)
except StartupError as error:
    print(error)
"""
    expandable = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    command, environment = [sys.executable, "-c", program], {**os.environ, **expandable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert "take expandable_segments:True out" in done.stdout, done.stderr[-2000:]
