"""Whether a prefill step should store each layer's KV in the peer's pool as it is computed, not have it copied after.

    python bench/dual_write.py --json dual.json                   # two GPUs
    TRITON_INTERPRET=1 python bench/dual_write.py --quick         # no GPU: tries the logic, tells nothing of speed

First the kernels of a chunk that turn and store, a layer after the other, with one pool and with two. Then a worker's
own captured step of that chunk, from its launch until all its KV is where it belongs, as the host sees it: nothing
sent; sent by the copy of the `cuda_ipc` transport, posted when the host saw the step's end, as a worker does with all
but a prompt's last blocks, or launched behind the step in stream order, as it does with those; and stored twice. Ways
take turns, and a way's cost is the median of its differences to the plain step of the same round: a step's own time
drifts by more than a hand-off takes. Then the same for a prompt of several chunks, where all copies but the last hide
behind the next chunk. The process whose pool it is says what arrived.

What a feature would need. A chunk's destination must be known before the chunk is launched: a claim that is answered
while the first chunk runs comes too late for that chunk, which then waits for it or is copied as today. A captured
graph would read the peers' addresses and tables from device memory, an address a token, since a step may serve several
requests. An attempt that is called off while its step is in flight is written to until that step ends, so its
quarantine must outlast the step. And blocks that the prefix cache found are computed by no step: they are copied as
today.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from dual_store import PeerPool, rope_and_store_twice
from gpu_timing import seconds
from gpus import require
from paceline import kernels
from paceline.checkpoint import ModelConfig, read_config, resolve
from paceline.engine.block_pool import BlockPool
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.weights import Weights, load
from paceline.kvtransfer.transports.pool_memory import Copy, Mapping, Pairs
from paceline.types import BLOCK_TOKENS, RequestId, SamplingParams
from peer_pool import PeerProcess, address_of, checksums, memory_of, open_peer, region_of

SLACK: Final = 4
"""The peer's pool has so many times a chunk's blocks: what is copied and what is stored lie strewn over it, apart."""
WORTH_MS: Final = 0.1
"""What storing twice must spare a lone chunk to be worth a feature: a tenth of what a hand-off may expose."""


@dataclass(frozen=True, slots=True)
class Row:
    """A way, and what it takes. Milliseconds."""

    what: str
    way: str
    ms: float
    exposed_ms: float  # more than where nothing is sent

    @property
    def text(self) -> str:
        """A line of the table."""
        return f"{self.what:24} {self.way:22} {self.ms:9.3f} ms   exposed {self.exposed_ms:7.3f} ms"


@contextmanager
def stored_twice(peer: PeerPool | None) -> Iterator[None]:
    """What models compute, or have captured, inside goes to the peer's pool too; as ever where there is none."""
    usual = kernels.rope_and_store
    if peer is not None:
        kernels.rope_and_store = partial(rope_and_store_twice, peer=peer)
    try:
        yield
    finally:
        kernels.rope_and_store = usual


class Step:
    """A worker's step over one chunk, which is a whole prompt. It may be run any number of times."""

    def __init__(self, config: ModelConfig, weights: Weights, prompt: Sequence[int], peer: PeerPool | None) -> None:
        count = len(prompt) // BLOCK_TOKENS
        self._peer = peer
        self._runner = GraphRunner(config, weights, num_blocks=count, token_budget=len(prompt), max_requests=1)
        self.pool: Tensor = self._runner.pool
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        lease = BlockPool(count).lease(count)
        self.blocks: Sequence[int] = list(lease.tables[0])
        request = EngineRequest(RequestId("chunk"), list(prompt), len(prompt), sampling, lease)
        self._chunks = [Chunk(request, 0, len(prompt))]
        with stored_twice(peer):
            if self.pool.is_cuda:
                self._runner.capture()
            self.token = self._runner.launch(self._chunks, _nothing).result().token_ids[0]

    def run(self) -> None:
        """Launches it again, on a GPU as nothing but its graph."""
        if self.pool.is_cuda:
            self._runner.last_graph.replay()
            return
        with stored_twice(self._peer):
            self._runner.launch(self._chunks, _nothing)


class Ways:
    """How a chunk's KV gets to the peer: `plain` sends nothing, each other way returns when all of it is there."""

    def __init__(self, plain: Step, twice: Step, target: Mapping, to_blocks: Sequence[int]) -> None:
        """Copies are of the plain step's blocks; `twice` stores where its own peer pool says."""
        self._plain, self._twice, self._target = plain, twice, target
        device = plain.pool.device
        self._on_gpu = device.type == "cuda"
        self._memory = memory_of(device)
        self._memory.export(region_of(plain.pool))
        self._pairs: Pairs = np.array(list(zip(plain.blocks, to_blocks, strict=True)), dtype=np.int32)

    @property
    def all(self) -> dict[str, Callable[[int], None]]:
        """By name, in the order of the table; each takes the number of chunks."""
        return {
            "nothing sent": self._send_nothing,
            "copied when it is seen": self._copy_after,
            "copied in stream order": self._copy_in_stream,
            "stored twice": self._store_twice,
        }

    def _send_nothing(self, chunks: int) -> None:
        self._repeat(self._plain, chunks)

    def _store_twice(self, chunks: int) -> None:
        self._repeat(self._twice, chunks)

    def _copy_after(self, chunks: int) -> None:
        """The next chunk is launched before this one ends, and this one's end is seen before its copy."""
        ended, copies = None, list[Copy]()
        for _ in range(chunks):
            self._plain.run()
            following = self._event()
            if ended is not None:
                _await(ended)
                copies.append(self._memory.copy(self._target, self._pairs))
            ended = following
        if ended is not None:
            _await(ended)
            copies.append(self._memory.copy(self._target, self._pairs))
        for copy in copies:
            _await(copy.done)

    def _copy_in_stream(self, chunks: int) -> None:
        copies = []
        for _ in range(chunks):
            self._plain.run()
            copies.append(self._memory.copy(self._target, self._pairs, in_stream=True))
        for copy in copies:
            _await(copy.done)

    def _repeat(self, step: Step, chunks: int) -> None:
        for _ in range(chunks):
            step.run()
        _await(self._event())

    def _event(self) -> Callable[[], bool]:
        """Whether all that was launched by now has ended."""
        if not self._on_gpu:
            return lambda: True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return lambda: bool(event.query())  # type: ignore[no-untyped-call]


def _await(done: Callable[[], bool]) -> None:
    while not done():
        pass


def _nothing() -> None:
    pass


def race(what: str, ways: Ways, chunks: int, rounds: int, device: torch.device) -> list[Row]:
    """All ways in turn, so many rounds; on a GPU after one that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in ways.all}
    uncounted = int(device.type == "cuda")
    for _ in range(uncounted + rounds):
        for name, send in ways.all.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            send(chunks)
            taken[name].append(1e3 * (time.perf_counter() - started))
    plain = taken["nothing sent"][uncounted:]
    return [
        Row(
            what,
            name,
            statistics.median(times[uncounted:]),
            statistics.median(time - alone for time, alone in zip(times[uncounted:], plain, strict=True)),
        )
        for name, times in taken.items()
    ]


def kernels_alone(config: ModelConfig, tokens: int, pool: Tensor, blocks: Sequence[int], peer: PeerPool) -> list[Row]:
    """Every layer's kernel that turns and stores, one behind the other in a graph."""
    heads = config.num_heads + 2 * config.num_kv_heads
    shape = (config.num_layers, tokens, heads, config.head_dim)
    qkv = torch.randn(*shape, device=pool.device, dtype=torch.float32).to(pool.dtype)
    cos, sin = kernels.rope_tables(config.head_dim, tokens, config.rope_theta, pool.device)
    rows = PeerPool.of(pool.data_ptr(), blocks, tokens, pool).rows

    def once() -> None:
        for layer in range(config.num_layers):
            kernels.rope_and_store(qkv[layer], cos, sin, rows, pool, layer)

    def twice() -> None:
        for layer in range(config.num_layers):
            rope_and_store_twice(qkv[layer], cos, sin, rows, pool, layer, peer)

    times = {name: 1e3 * seconds(call, pool.device) for name, call in (("one pool", once), ("two pools", twice))}
    return [Row("turn and store, alone", name, ms, ms - times["one pool"]) for name, ms in times.items()]


def wrong_blocks(peer: PeerProcess, step: Step, there: Sequence[int]) -> int:
    """Blocks that do not hold there what they hold here; all of them where they hold nothing here."""
    ours, theirs = checksums(step.pool, step.blocks), peer.checksums(there)
    return sum(here != arrived or here == 0 for here, arrived in zip(ours, theirs, strict=True))


def verdict(rows: Sequence[Row]) -> str:
    """What a lone chunk's exposed times say."""
    lone = {row.way: row.exposed_ms for row in rows if row.what.startswith("1 chunk")}
    spared = lone["copied in stream order"] - lone["stored twice"]
    worth = "worth a feature" if spared >= WORTH_MS else "not worth a feature"
    return (
        f"verdict: storing twice spares {spared:.3f} ms of a lone chunk against the copy in stream order, "
        f"{lone['copied when it is seen'] - lone['stored twice']:.3f} ms against the one after it is seen: {worth} "
        f"(from {WORTH_MS} ms against the first on)"
    )


def measure(config: ModelConfig, device: torch.device, tokens: int, chunks: int, rounds: int) -> tuple[list[Row], int]:
    """All rows, and how many blocks arrived wrong; one more where both steps do not sample the same."""
    source = resolve(config.name, cache_dir=Path("unused"))
    weights = load(source, config, dtype=torch.bfloat16, device=device)
    dice = random.Random(0)
    prompt = dice.choices(range(config.vocab_size), k=tokens)
    count = tokens // BLOCK_TOKENS
    shape = GraphRunner.pool_shape(config, SLACK * count)
    strewn = dice.sample(range(SLACK * count), 2 * count)
    for_copies, for_stores = strewn[:count], strewn[count:]
    plain = Step(config, weights, prompt, None)
    with closing(open_peer(shape, device)) as peer:
        memory = memory_of(device)
        memory.export(region_of(plain.pool))
        mapping = memory.map(peer.exported, region_of(plain.pool).block_bytes * SLACK * count)
        to = PeerPool.of(address_of(mapping), for_stores, tokens, plain.pool)
        twice = Step(config, weights, prompt, to)
        rows = kernels_alone(config, tokens, twice.pool, twice.blocks, to)
        ways = Ways(plain, twice, mapping, for_copies)
        for length in (1, chunks):
            name = f"{length} chunk{'s' * (length > 1)} of {tokens}"
            rows += race(name, ways, length, rounds, device)
        wrong = wrong_blocks(peer, plain, for_copies) + wrong_blocks(peer, twice, for_stores)
        wrong += plain.token != twice.token
        mapping.close()
    return rows, wrong


def main() -> int:
    """Measures, prints, writes JSON; the exit code says whether every block arrived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=1024, help="of a chunk")
    parser.add_argument("--chunks", type=int, default=8, help="of the longer prompt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, interpreted: tries the program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.quick:
        require("cuda:0", "cuda:1")
    device = torch.device("cpu" if args.quick else args.device)
    tokens, chunks, rounds = (32, 2, 1) if args.quick else (args.tokens, args.chunks, args.rounds)
    source = resolve("dummy:tiny" if args.quick else "dummy:llama-3.1-8b", cache_dir=Path("unused"))
    config = msgspec.structs.replace(read_config(source), context_tokens=2 * tokens)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.inference_mode(), kernels.forced(kernels.Backend.TRITON):
        rows, wrong = measure(config, device, tokens, chunks, rounds)
    print("\n".join(row.text for row in rows))
    print(f"{wrong} blocks arrived wrong")
    print(verdict(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"wrong": wrong, "rows": [asdict(row) for row in rows]}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
