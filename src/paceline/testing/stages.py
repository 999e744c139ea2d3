"""Cancels requests of a real cluster at a chosen stage of their lives, and proves from its metrics that it hit it.

A stage that would flash by is held with SIGSTOP: of the process whose next act would leave it. What a cancel hit is
read from the decode worker's count of ended reservations by state, so a miss is seen, and tried again.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.testing.cancel_ground import (
    CARRY_S,
    CHUNK_TOKENS,
    LOCAL_TOKENS,
    OUTPUT_COUNTER,
    PROMPT_COUNTER,
    PROMPT_TOKENS,
    SLOTS,
    CancelGround,
    Missed,
)
from paceline.testing.pair import Pair
from paceline.testing.scrape import wait_for
from paceline.types import SamplingParams

_BATCH: Final = 5  # cancels between two looks at the pools
_TRIES: Final = 6  # at most, for each hit


class Stage(enum.Enum):
    """Where a request is when it is cancelled: a reservation's states on D, and its places before."""

    ROUTER_QUEUE = "router queue"
    PREFILL_QUEUE = "P queue"
    MID_CHUNK = "P mid-chunk"
    RESERVED = "reserved"
    FILLING = "filling"
    HANDED_OVER = "P done, D not"
    LANDED = "landed"
    LOCAL = "local"
    RUNNING = "running"


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


class CancelBench(CancelGround):
    """Cancels at a stage, as often as asked."""

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
        tally.tries += number
        computed = self._settled("prefill-0", PROMPT_COUNTER)
        with self.ask(PROMPT_TOKENS) as holder, suppress(Missed):
            self._await_chunks(computed)
            with self._stopped(self._engine["prefill-0"]):
                probes = [self.ask(PROMPT_TOKENS) for _ in range(number)]
                wait_for(lambda: self._reservations("reserved", "filling") == number + 1, "the probes' reservations")
                time.sleep(CARRY_S)
            wait_for(lambda: self._load("prefill-0").waiting == number, "the wait behind another prompt")
            for probe in probes:
                probe.cancel()
            stopped = wait_for(lambda: self._load("prefill-0").waiting == 0, "the end of the wait")
            tally.slowest_stop_s = max(tally.slowest_stop_s, stopped)
            next(holder)
            wait_for(lambda: self._load("prefill-0").running == 0, "the prompt's end")
            if self._settled("prefill-0", PROMPT_COUNTER) - computed <= PROMPT_TOKENS:
                tally.hits += number

    def _mid_chunk(self, tally: Tally, number: int) -> None:
        """The prefill engine is stopped between two chunks, or in one; after the cancel it may end that one only."""
        for _ in range(number):
            tally.tries += 1
            before = self._settled("prefill-0", PROMPT_COUNTER)
            with self.ask(PROMPT_TOKENS) as probe, suppress(Missed):
                self._await_chunks(before)
                with self._stopped(self._engine["prefill-0"]):
                    held = self._settled("prefill-0", PROMPT_COUNTER)
                    self._cancel(probe)
                self._await_stop(tally)
                after = self._settled("prefill-0", PROMPT_COUNTER)
                tally.hits += held - before < PROMPT_TOKENS
                tally.tokens_after.append(int(after - held))

    def _reserved(self, tally: Tally, number: int) -> None:
        """The prefill front stands, so nobody claims. The blocks must be free while it still stands."""
        with self._stopped(self._front["prefill-0"]):
            for _ in range(number):
                with self._counting(tally, "reserved") as before, self.ask(PROMPT_TOKENS) as probe:
                    self._await_state("reserved", before)
                    self._cancel(probe)
                    took = wait_for(lambda: self._pool_is_whole("decode-0"), "the blocks' return")
                    tally.slowest_stop_s = max(tally.slowest_stop_s, took)

    def _filling(self, tally: Tally, number: int) -> None:
        """The prefill engine stands with the claim granted and parts written: the blocks are in quarantine first."""
        for _ in range(number):
            filling = self._ended(state="filling")
            with self._counting(tally, "filling") as before, self.ask(PROMPT_TOKENS) as probe:
                self._await_state("filling", before)
                with self._stopped(self._engine["prefill-0"]):
                    self._cancel(probe)
                    self._await_end(before)
                    if self._ended(state="filling") > filling:
                        held = self._load("decode-0")
                        assert 0 < held.quarantined_blocks == held.total_blocks - held.free_blocks, held
            self._await_stop(tally)

    def _handed_over(self, tally: Tally, number: int) -> None:
        """The decode engine stands while the prefill worker ends its part: the first token is out, D knows nothing."""
        for _ in range(number):
            with self._counting(tally, "filling") as before, self.ask(PROMPT_TOKENS) as probe:
                self._await_state("filling", before)
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
            held: float | None = None
            with self._counting(tally, state) as before, self.ask(prompt_tokens) as probe:
                self._await_state(state, before)
                with self._stopped(self._engine["decode-0"]):
                    held = self._settled("decode-0", counter)
                    self._cancel(probe)
            self._await_stop(tally)
            if held is not None:
                tally.tokens_after.append(int(self._settled("decode-0", counter) - held))

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _await_stop(self, tally: Tally) -> None:
        """Waits until no worker has the cancelled request in hand."""

        def stopped() -> bool:
            prefill, decode = self._load("prefill-0"), self._load("decode-0")
            return prefill.running + prefill.waiting == 0 and decode.running + decode.waiting == 0

        tally.slowest_stop_s = max(tally.slowest_stop_s, wait_for(stopped, "the workers' stop"))

    @contextmanager
    def _counting(self, tally: Tally, state: str) -> Iterator[float]:
        """Counts the one reservation that ends inside as a hit if it ended in `state` because its stream was lost.

        Gives the number of reservations that had ended before.
        """
        before, all_before = self._ended(state=state, cause="stream_lost"), self._ended()
        with suppress(Missed):
            yield all_before
        self._await_end(all_before)
        tally.tries += 1
        tally.hits += int(self._ended(state=state, cause="stream_lost") - before)
