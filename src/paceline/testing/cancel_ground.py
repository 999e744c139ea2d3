"""A cluster of one prefill and one decode worker that is slow and small enough to be caught in the act.

It is shaped by its settings: chunks of a block, a prompt of over a hundred of them, few slots on the prefill worker,
and long timers, since tests stop processes for a while.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from paceline.cli.plan import free_ports
from paceline.cli.supervisor import Died
from paceline.client import Client, Stream, worker_load
from paceline.testing.cluster import Cluster
from paceline.testing.scrape import Scrape, wait_for
from paceline.types import Role, WorkerLoad

CHUNK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 1_900  # over a hundred chunks: long enough to be caught at work
LOCAL_BELOW: Final = 1_500
LOCAL_TOKENS: Final = LOCAL_BELOW - 1
# Slow enough that a prompt, and a step, can be caught at work.
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
STATES: Final = ("reserved", "filling", "landed", "local", "running")
PROMPT_COUNTER: Final = "paceline_engine_prompt_tokens_computed_total"
OUTPUT_COUNTER: Final = "paceline_engine_generated_tokens_total"
SLOTS: Final = 12  # requests in the prefill worker's hands; more wait in the router
CARRY_S: Final = 0.03  # for a cancellation to reach the queue of a stopped process


class Missed(Exception):
    """The request went past the stage before it could be held there."""


class CancelGround:
    """The cluster, and what is done to it and read from it. A context manager; leaving it stops the cluster."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-model-")
        shape = Path(self._folder.name) / "config.json"
        shape.write_text(json.dumps(_MODEL))
        ports = free_ports("127.0.0.1", 2)
        self._metrics = dict(zip(("prefill-0", "decode-0"), ports, strict=True))
        self.cluster = Cluster.start(
            prefill=1,
            decode=1,
            model=f"dummy:{shape}",
            pool_blocks=2_048,
            prefix_cache=False,  # equal prompts are to be computed each time
            max_batch_tokens=CHUNK_TOKENS,
            prefill_slots=SLOTS,
            local_prefill_below=LOCAL_BELOW,
            claim_timeout_s=60.0,
            silence_timeout_s=60.0,
            per_role={name: {"metrics_port": port} for name, port in self._metrics.items()},
        )
        self.client: Client = self.cluster.client()
        self._engine = {name: pids[-1] for name, pids in self.cluster.processes.items()}
        self._front = {name: pids[0] for name, pids in self.cluster.processes.items()}
        self._address = {worker.key.worker_id: worker.address for worker in self.client.loads().workers}
        # The pair measures itself once, which is a reservation too.
        wait_for(lambda: self._ended() >= 1, "the pair's measurement")
        self.cluster.wait_idle()
        self._expected = self._serve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        if error is None:
            self.cluster.stop()
        else:
            self.cluster.kill_all()
        self._folder.cleanup()

    @property
    def calls_cut(self) -> int:
        """Calls that a worker still had in hand when its grace was over. For after the end."""
        return sum("grace period over" in line for line in self.cluster.log())

    def ask(self, prompt_tokens: int, *, max_tokens: int = 100) -> Stream:
        """A request of so many ids: computed on the decode worker if fewer than LOCAL_BELOW."""
        return self.client.generate([5] * prompt_tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def check(self) -> None:
        """AssertionError unless nothing is left of earlier requests, and a new one is served as the first was."""
        self._check_nothing_left()
        assert self._serve() == self._expected, "the request after the cancels has other tokens than before"

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _serve(self) -> tuple[int, ...]:
        prompt = [7 * place % 500 + 3 for place in range(LOCAL_BELOW)]
        return self.client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True).token_ids

    def _cancel(self, probe: Stream) -> None:
        """Cancels, and waits until that has gone as far as it can go."""
        probe.cancel()
        wait_for(lambda: self.client.loads().active == 0, "the end at the router")
        time.sleep(CARRY_S)

    @contextmanager
    def _stopped(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    # ---- looks -------------------------------------------------------------------------------------------------------

    def _scrape(self, name: str) -> Scrape:
        return Scrape.of(self._metrics[name])

    def _ended(self, **labels: str) -> float:
        return self._scrape("decode-0").total("paceline_reservations_ended_total", **labels)

    def _load(self, name: str) -> WorkerLoad:
        return worker_load(self._address[name], Role.PREFILL if name == "prefill-0" else Role.DECODE)

    def _reservations(self, *states: str) -> float:
        decode = self._scrape("decode-0")
        return sum(decode.value("paceline_reservations", state=state) for state in states)

    def _await_state(self, state: str, ended: float) -> None:
        """Waits for the one reservation to be in the state. Raises Missed where one more than `ended` ended first."""
        wait_for(lambda: self._reservations(state) == 1 or self._ended() > ended, state)
        if self._reservations(state) != 1:
            raise Missed

    def _await_end(self, ended: float) -> None:
        """Waits until one reservation more than `ended` has ended."""
        wait_for(lambda: self._ended() == ended + 1, "the reservation's end")

    def _await_chunks(self, before: float) -> None:
        """Waits until the prefill worker is amid a prompt, having computed `before` tokens so far. Raises Missed."""

        def computed() -> float:
            return self._scrape("prefill-0").value(PROMPT_COUNTER) - before

        wait_for(lambda: computed() > 0, "some chunks")
        if computed() >= PROMPT_TOKENS:
            raise Missed

    def _settled(self, name: str, counter: str) -> float:
        """A counter of an engine that does nothing any more, once its last report has been read."""
        value = -1.0
        while (now := self._scrape(name).value(counter)) != value:
            value = now
            time.sleep(CARRY_S)
        return value

    def _pool_is_whole(self, name: str) -> bool:
        load = self._load(name)
        return load.free_blocks == load.total_blocks and load.committed_blocks == load.quarantined_blocks == 0

    def _check_nothing_left(self) -> None:
        decode = self._scrape("decode-0")
        left = {state: decode.value("paceline_reservations", state=state) for state in STATES}
        assert not any(left.values()), f"reservations are left: {left}"
        assert all(self._pool_is_whole(name) for name in self._metrics), "blocks are missing"
        died = [event for event in self.cluster.events if isinstance(event, Died)]
        assert not died, f"a role died: {died}"
