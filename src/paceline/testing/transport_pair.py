"""A writer and a target of any kind of transport, with pools of known contents: what the conformance suite works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.kvtransfer.transfer import merge
from paceline.kvtransfer.transports import ucxx
from paceline.kvtransfer.transports.loopback import Hub
from paceline.testing.transport_end import GPU_KINDS, End, LocalEnd, ProcessEnd, pattern, wait_until

BLOCKS = 48
BLOCK_BYTES = 256 * 1024
ALL = range(BLOCKS)
IPC_KINDS = ("ipc-on-host", "by-peer", *(GPU_KINDS if torch.cuda.is_available() else ()))
PROCESS_KINDS = ("nixl", "nixl-tcp", *IPC_KINDS, *(("ucxx",) if ucxx.available() is None else ()))
KINDS = ("loopback", "nixl-one-process", *PROCESS_KINDS)
WRITER_SEED, TARGET_SEED = 1, 2


@dataclass
class Bench:
    """Makes ends of one kind, and closes them."""

    kind: str
    hub: Hub = field(default_factory=Hub)
    ends: list[End] = field(default_factory=list)

    def end(self, name: str, *, num_blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> End:
        """A new end, closed with the bench."""
        made: End
        if self.kind == "loopback":
            made = LocalEnd("loopback", name, num_blocks, block_bytes, self.hub)
        elif self.kind == "nixl-one-process":
            made = LocalEnd("nixl", name, num_blocks, block_bytes)
        else:
            environment = {"UCX_TLS": "tcp"} if self.kind == "nixl-tcp" else {}
            made = ProcessEnd(self.kind, name, num_blocks, block_bytes, environment)
        self.ends.append(made)
        return made

    def kill(self, end: End) -> None:
        """Its process dies without a word, as far as the kind can."""
        if isinstance(end, ProcessEnd):
            end.kill()
        elif isinstance(end, LocalEnd) and self.kind == "loopback":
            end.close()
        else:
            raise ValueError("one process cannot lose half of itself")

    def close(self) -> None:
        """Closes all ends."""
        for end in self.ends:
            end.close()


@dataclass
class Pair:
    """A writer connected to a target, with pools of known contents."""

    bench: Bench
    writer: End
    target: End
    peer: str

    @classmethod
    def make(cls, bench: Bench) -> Pair:
        """Two ends, the writer connected to the target."""
        writer, target = bench.end("writer"), bench.end("target")
        return cls(bench, writer, target, writer.call("connect", target.call("metadata")))

    def refill(self) -> None:
        """Gives both pools their first contents again."""
        self.writer.call("fill", ALL, WRITER_SEED)
        self.target.call("fill", ALL, TARGET_SEED)
        self.target.call("watch", ())

    def post(self, source: Sequence[int], target: Sequence[int], notification: bytes | None) -> int:
        """Writes `source[i]` to `target[i]`, merged, and returns the handle's number."""
        pieces = [(p.source_block, p.target_block, p.num_blocks) for p in merge(source, target)]
        return int(self.writer.call("post", self.peer, pieces, notification))

    def wait_finished(self, *handles: int) -> dict[int, str | None]:
        """Waits until the writer's handles are terminal, and returns their errors."""

        def all_finished() -> bool:
            return set(handles) <= set(self.writer.call("finished"))

        wait_until(all_finished, f"the end of handles {handles}", self.writer, self.target)
        finished = self.writer.call("finished")
        return {handle: finished[handle] for handle in handles}

    def arrived(self) -> list[bytes]:
        """The payloads that the target has seen, in order."""
        return [payload for payload, _ in self.target.call("notifications")]

    def wait_notified(self, *payloads: bytes) -> None:
        """Waits until the target has seen all of them."""

        def all_arrived() -> bool:
            return set(payloads) <= set(self.arrived())

        wait_until(all_arrived, f"the arrival of {payloads}", self.writer, self.target)

    def assert_target_holds(self, written: dict[int, int]) -> None:
        """Byte by byte: target block `t` holds the writer's `written[t]`, and all others what they held before."""
        for block in ALL:
            seed, origin = (WRITER_SEED, written[block]) if block in written else (TARGET_SEED, block)
            assert self.target.call("read", block) == pattern(seed, origin, BLOCK_BYTES), f"block {block}"
