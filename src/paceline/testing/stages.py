"""Cancels requests of a real cluster at a chosen stage of their lives, and proves from its metrics that it hit it.

A stage that would flash by is held with SIGSTOP: of the process whose next act would leave it. What a cancel hit is
read from the decode worker's count of ended reservations by state, so a miss is seen, and tried again.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.cli.plan import free_ports
from paceline.cli.supervisor import Died
from paceline.client import Client, Stream, worker_load
from paceline.testing.cluster import Cluster
from paceline.testing.pair import Pair
from paceline.testing.scrape import Scrape, wait_for
from paceline.types import Role, SamplingParams, WorkerLoad

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
_CARRY_S: Final = 0.03  # for a cancellation to reach the queue of a stopped process
_BATCH: Final = 5  # cancels between two looks at the pools
_TRIES: Final = 6  # at most, for each hit


class Stage(enum.Enum):
    """Where a request is when it is cancelled: section 6's states on D, and its places before."""

    ROUTER_QUEUE = "router queue"
    PREFILL_QUEUE = "P queue"
    MID_CHUNK = "P mid-chunk"
    RESERVED = "reserved"
    FILLING = "filling"
    HANDED_OVER = "P done, D not"
    LANDED = "landed"
    LOCAL = "local"
    RUNNING = "running"


class _Missed(Exception):
    """The request went past the stage before it could be held there."""


@dataclass
class Tally:
    """What the cancels at one stage did. Times are in seconds.

    `tokens_after` are of the step that was under way, and at times of steps before whose report the stop held back.
    """

    stage: Stage
    hits: int = 0
    tries: int = 0
    tokens_after: list[int] = field(default_factory=list)  # that the engine told of after the cancel was in its queue
    slowest_stop_s: float = 0.0  # from the cancel until neither worker had it in hand
    slowest_return_s: float = 0.0  # from the last cancel of a batch until every block was back
    served_after: int = 0  # requests served between the batches, each with the right tokens


def cancel_landed(folder: Path, hits: int) -> Tally:
    """LANDED lasts from one round of the decode engine's loop to the next: it is hit in one process, round by round."""
    tally, sampling = Tally(Stage.LANDED), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    pair, prompt = Pair(folder), [7 * place % 500 + 3 for place in range(100)]
    pair.reserve("alone", prompt, sampling, local=True)
    pair.pump_until_idle()
    expected = pair.tokens("alone")
    for number in range(hits):
        tally.tries += 1
        name = f"landed-{number}"
        pair.hand_over(name, prompt, sampling)
        pair.pump_until_landed()
        generated = pair.decode.engine.stats.output_tokens
        pair.cancel(name)
        pair.pump_until_idle()
        tally.tokens_after.append(pair.decode.engine.stats.output_tokens - generated)
        tally.hits += pair.take_ended().count(("landed", "stream_lost", 1))
        pair.hand_over(f"after-{number}", prompt, sampling)
        pair.pump_until_idle()
        assert pair.tokens(f"after-{number}") == expected, "the request after the cancel has other tokens than before"
        pair.take_ended()
        tally.served_after += 1
    return tally


class CancelBench:
    """A cluster of one prefill and one decode worker, shaped so that each stage can be held. Close it once."""

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

    def __enter__(self) -> CancelBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
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

    def cancel_at(self, stage: Stage, hits: int) -> Tally:
        """Cancels until `hits` cancels hit the stage. AssertionError where something does not come back."""
        tally = Tally(stage)
        act = {
            Stage.ROUTER_QUEUE: self._in_router_queue,
            Stage.PREFILL_QUEUE: self._in_prefill_queue,
            Stage.MID_CHUNK: self._mid_chunk,
            Stage.RESERVED: self._reserved,
            Stage.FILLING: self._filling,
            Stage.HANDED_OVER: self._handed_over,
            Stage.LOCAL: self._local,
            Stage.RUNNING: self._running,
        }[stage]
        while tally.hits < hits:
            assert tally.tries < _TRIES * hits, f"{tally.hits} of {tally.tries} cancels hit {stage.value}"
            act(tally, min(_BATCH, hits - tally.hits))
            began = time.monotonic()
            self.cluster.wait_idle()
            tally.slowest_return_s = max(tally.slowest_return_s, time.monotonic() - began)
            self.check()
            tally.served_after += 1
        return tally

    # ---- the stages, each a batch of cancels -------------------------------------------------------------------------

    def _in_router_queue(self, tally: Tally, number: int) -> None:
        """The prefill worker's slots are taken, and its engine stands: what comes next waits in the router."""
        with self._stopped(self._engine["prefill-0"]):
            holders = [self.ask(PROMPT_TOKENS, max_tokens=2) for _ in range(SLOTS)]
            wait_for(lambda: self.client.loads().active == SLOTS, "the holders' start")
            before = self._ended()
            for _ in range(number):
                probe = self.ask(PROMPT_TOKENS)
                wait_for(lambda: self.client.loads().queued == 1, "the wait in the router")
                probe.cancel()
                tally.slowest_stop_s = max(
                    tally.slowest_stop_s, wait_for(lambda: self.client.loads().queued == 0, "the end of the wait")
                )
                tally.tries += 1
                tally.hits += self._ended() == before
            for holder in holders[1:]:
                holder.cancel()
        assert len(holders[0].complete().token_ids) == 2, "the request before the cancelled ones is served"

    def _in_prefill_queue(self, tally: Tally, number: int) -> None:
        """One prompt is computed, the probes wait behind it in the engine: none of theirs may ever be."""
        computed = self._settled("prefill-0", PROMPT_COUNTER)
        with self.ask(PROMPT_TOKENS) as holder:
            self._await_chunks()
            with self._stopped(self._engine["prefill-0"]):
                probes = [self.ask(PROMPT_TOKENS) for _ in range(number)]
                wait_for(lambda: self._reservations("reserved", "filling") == number + 1, "the probes' reservations")
                time.sleep(_CARRY_S)
            wait_for(lambda: self._load("prefill-0").waiting == number, "the wait behind another prompt")
            for probe in probes:
                probe.cancel()
            stopped = wait_for(lambda: self._load("prefill-0").waiting == 0, "the end of the wait")
            tally.slowest_stop_s = max(tally.slowest_stop_s, stopped)
            next(holder)
        wait_for(lambda: self._load("prefill-0").running == 0, "the prompt's end")
        after = self._settled("prefill-0", PROMPT_COUNTER)
        tally.tries += number
        if after - computed <= PROMPT_TOKENS:
            tally.hits += number

    def _mid_chunk(self, tally: Tally, number: int) -> None:
        """The prefill engine is stopped between two chunks, or in one; after the cancel it may end that one only."""
        for _ in range(number):
            before = self._settled("prefill-0", PROMPT_COUNTER)
            with self.ask(PROMPT_TOKENS) as probe:
                self._await_chunks()
                with self._stopped(self._engine["prefill-0"]):
                    held = self._settled("prefill-0", PROMPT_COUNTER)
                    self._cancel(probe)
            self._await_stop(tally)
            after = self._settled("prefill-0", PROMPT_COUNTER)
            tally.tries += 1
            tally.hits += 0 < held - before < PROMPT_TOKENS
            tally.tokens_after.append(int(after - held))

    def _reserved(self, tally: Tally, number: int) -> None:
        """The prefill front stands, so nobody claims. The blocks must be free while it still stands."""
        with self._stopped(self._front["prefill-0"]):
            for _ in range(number):
                with self.ask(PROMPT_TOKENS) as probe, self._counting(tally, "reserved"):
                    self._await_state("reserved")
                    self._cancel(probe)
                    took = wait_for(lambda: self._pool_is_whole("decode-0"), "the blocks' return")
                    tally.slowest_stop_s = max(tally.slowest_stop_s, took)

    def _filling(self, tally: Tally, number: int) -> None:
        """The prefill engine stands with the claim granted and parts written: the blocks are in quarantine first."""
        for _ in range(number):
            with self.ask(PROMPT_TOKENS) as probe, self._counting(tally, "filling"):
                self._await_state("filling")
                with self._stopped(self._engine["prefill-0"]):
                    self._cancel(probe)
                    wait_for(lambda: self._load("decode-0").quarantined_blocks > 0, "the quarantine")
                    assert not self._pool_is_whole("decode-0"), "a stopped writer's blocks were freed"
            self._await_stop(tally)

    def _handed_over(self, tally: Tally, number: int) -> None:
        """The decode engine stands while the prefill worker ends its part: the first token is out, D knows nothing."""
        for _ in range(number):
            with self.ask(PROMPT_TOKENS) as probe, self._counting(tally, "filling"):
                self._await_state("filling")
                with self._stopped(self._engine["decode-0"]):
                    next(probe)
                    self._cancel(probe)
            self._await_stop(tally)

    def _local(self, tally: Tally, number: int) -> None:
        """The decode engine is stopped while it computes a prompt itself."""
        self._on_decode(tally, number, "local", PROMPT_COUNTER, LOCAL_TOKENS)

    def _running(self, tally: Tally, number: int) -> None:
        """The decode engine is stopped between two tokens, or at one."""
        self._on_decode(tally, number, "running", OUTPUT_COUNTER, CHUNK_TOKENS)

    def _on_decode(self, tally: Tally, number: int, state: str, counter: str, prompt_tokens: int) -> None:
        for _ in range(number):
            with self.ask(prompt_tokens) as probe, self._counting(tally, state):
                self._await_state(state)
                with self._stopped(self._engine["decode-0"]):
                    held = self._settled("decode-0", counter)
                    self._cancel(probe)
            self._await_stop(tally)
            after = self._settled("decode-0", counter)
            tally.tokens_after.append(int(after - held))

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _serve(self) -> tuple[int, ...]:
        prompt = [7 * place % 500 + 3 for place in range(LOCAL_BELOW)]
        return self.client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True).token_ids

    def _cancel(self, probe: Stream) -> None:
        """Cancels, and waits until that has gone as far as it can go."""
        probe.cancel()
        wait_for(lambda: self.client.loads().active == 0, "the end at the router")
        time.sleep(_CARRY_S)

    def _await_stop(self, tally: Tally) -> None:
        """Waits until no worker has the cancelled request in hand."""

        def stopped() -> bool:
            prefill, decode = self._load("prefill-0"), self._load("decode-0")
            return prefill.running + prefill.waiting == 0 and decode.running + decode.waiting == 0

        tally.slowest_stop_s = max(tally.slowest_stop_s, wait_for(stopped, "the workers' stop"))

    @contextmanager
    def _stopped(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _counting(self, tally: Tally, state: str) -> Iterator[None]:
        """Counts the one reservation that ends inside as a hit if it ended in `state` because its stream was lost."""
        before, all_before = self._ended(state=state, cause="stream_lost"), self._ended()
        with suppress(_Missed):
            yield
        wait_for(lambda: self._ended() == all_before + 1, "the reservation's end")
        tally.tries += 1
        tally.hits += int(self._ended(state=state, cause="stream_lost") - before)

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

    def _await_state(self, state: str) -> None:
        """Waits for the one reservation to be in the state. Raises _Missed where it ends before it is seen there."""
        ended = self._ended()
        wait_for(lambda: self._reservations(state) == 1 or self._ended() > ended, state)
        if self._reservations(state) != 1:
            raise _Missed

    def _await_chunks(self) -> None:
        wait_for(lambda: 0 < self._load("prefill-0").pending_prompt_tokens < PROMPT_TOKENS, "some chunks")

    def _settled(self, name: str, counter: str) -> float:
        """A counter of an engine that does nothing any more, once its last report has been read."""
        value = -1.0
        while (now := self._scrape(name).value(counter)) != value:
            value = now
            time.sleep(_CARRY_S)
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
