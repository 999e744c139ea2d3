"""Steps on a GPU: captured graphs over padded shapes, one small upload before, one small download after.

The life of a step here: `Slots` gives each request its place on the device, and what its block table has gained is
sent there; a few numbers a request are packed into pinned memory and copied over; the graph of the step's shape lays
them out, runs the model and leaves logits; sampling follows in stream order; the tokens stay on the device, where the
next step finds them, and are copied to pinned memory, where the host finds them once the step's event has come.

A step that asks for more (penalties, a prompt's log-probabilities, several first tokens) is computed at once, as on a
CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline import kernels
from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.batch import Batch
from paceline.engine.device_sampler import DeviceSampler, PendingLogprobs
from paceline.engine.request import Chunk, Sampled
from paceline.engine.runner import Runner, RunningStep
from paceline.engine.scoring import Scoring
from paceline.engine.slots import Slots
from paceline.engine.step_inputs import TABLE_ENTRIES, Staging, StepInputs, pack
from paceline.engine.step_shape import StepShape, StepShapes
from paceline.engine.weights import Weights
from paceline.kernels.paged_plan import PagedPlan, count_splits
from paceline.types import TokenLogprob, blocks_for


@dataclass(slots=True)
class DeviceStep:
    """A step in flight. Its tokens are in `results` when `event` has come."""

    chunks: Sequence[Chunk]
    results: Tensor  # int64 [requests], pinned: a token, or -1 for unusable logits
    logprobs: PendingLogprobs | None
    event: torch.cuda.Event | None  # None: computed already

    @property
    def done(self) -> bool:
        """As `RunningStep.done`."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Sampled:
        """As `RunningStep.result`."""
        if self.event is not None:
            self.event.synchronize()
        found = self.results[: len(self.chunks)].tolist()
        rows = [row for row, chunk in enumerate(self.chunks) if chunk.samples]
        sampled = [found[row] for row in rows]
        bad = frozenset(entry for entry, token_id in enumerate(sampled) if token_id < 0)
        return Sampled(sampled, bad, [] if self.logprobs is None else [self._scored(row, found[row]) for row in rows])

    def _scored(self, row: int, token_id: int) -> TokenLogprob | None:
        number = self.chunks[row].request.sampling.logprobs
        return None if number is None or self.logprobs is None else self.logprobs.of(row, token_id, number)


@dataclass(slots=True)
class _Graph:
    """A captured forward pass, and where it leaves its logits."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor = field(repr=False)  # [requests, vocab], float32


class GraphRunner(Runner):
    """Computes steps behind each other on one device, while the host goes on.

    Without `capture` each step launches its kernels one by one; what is computed is the same.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, *, num_blocks: int, token_budget: int, max_requests: int
    ) -> None:
        super().__init__(config, weights, num_blocks=num_blocks, depth=1)
        device = self.pool.device
        self._on_gpu = device.type == "cuda"
        self._config = config
        self._shapes = StepShapes(token_budget, max_requests)
        self._graphs: dict[StepShape, _Graph] = {}
        self._width = blocks_for(config.context_tokens)
        most_tokens, most_requests = max(token_budget, max_requests), max_requests
        num_slots = 2 * max_requests
        count = len(self.groups)
        self._slots = Slots(num_slots, self._width, groups=count)
        self._spare_slot = num_slots
        self._tables = torch.zeros((num_slots + 1, count, self._width), dtype=torch.int32, device=device)
        self._latest = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        ints = 2 * most_tokens + 3 * most_requests + 1
        self._ints = torch.zeros(ints, dtype=torch.int32, device=device)
        self._entries = torch.zeros(2 * TABLE_ENTRIES, dtype=torch.int64, device=device)
        self._sampler = DeviceSampler(most_requests, device)
        # One more than can be in flight, so that a step is packed while others are.
        rings = [Staging(ints, 4 * most_requests, most_requests, device) for _ in range(self.depth + 2)]
        self._staging = itertools.cycle(rings)
        self._token_ids = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._rows = torch.full((count, most_tokens, 1), -1, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(most_requests, dtype=torch.int32, device=device)
        self._sample_rows = torch.zeros(most_requests, dtype=torch.int64, device=device)
        self._step_tables = torch.zeros((count, most_requests, self._width), dtype=torch.int32, device=device)
        self._last: DeviceStep | None = None
        self.last_shape: StepShape | None = None
        """Of the step that was launched last."""
        self.compare: Callable[[Tensor, Tensor], None] | None = None
        """For checks: gets each step's logits, and those of the same kernels launched one by one."""

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures the graph of every shape; `progress` hears of (captured, in all)."""
        pool = torch.cuda.graph_pool_handle()
        shapes = self._shapes.all
        stream: Any = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(stream):
            for index, shape in enumerate(shapes):
                self._ints.zero_()
                StepInputs.within(self._ints, shape).owners.fill_(-1)
                # Compiles, and sets up what kernels and libraries keep for a stream from their first call on it: made
                # while a graph is captured, that would be the graph's own.
                self._forward(shape)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = self._forward(shape)
                self._graphs[shape] = _Graph(graph, logits)
                if progress is not None:
                    progress(index + 1, len(shapes))
        torch.cuda.synchronize(self.pool.device)
        torch.cuda.empty_cache()  # what the first calls worked with is kept for that stream else

    @property
    def last_graph(self) -> torch.cuda.CUDAGraph:
        """The graph of the step that was launched last, for whoever times it. There is one after `capture`."""
        assert self.last_shape is not None, "a step was launched"
        return self._graphs[self.last_shape].graph

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest steps on padding, kernel by kernel, with their sampling."""
        for shape in {each.decodes: each for each in reversed(self._shapes.all)}.values():
            StepInputs.within(self._ints.zero_(), shape).owners.fill_(-1)
            self._sampler.rehearse(self._forward(shape))

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> RunningStep:
        """As `StepRunner.launch`."""
        if any(_asks_for_more(chunk) for chunk in chunks):
            return self._compute_now(chunks, tick)
        shape = self.last_shape = self._shapes.of(sum(chunk.num_tokens for chunk in chunks), len(chunks))
        staging = next(self._staging)
        slots = self._slots.place(chunks)
        self._send_tables(staging)
        size = StepInputs.size(shape)
        pack(staging.ints_array[:size], shape, chunks, slots, self._spare_slot, self._known)
        self._ints[:size].copy_(staging.ints[:size], non_blocking=True)
        graph = self._graphs.get(shape)
        if graph is None:
            logits = self._forward(shape)
        else:
            graph.graph.replay()
            logits = graph.logits
        if self.compare is not None:
            self.compare(logits, self._forward(shape, overlapping=False))
        token_ids, logprobs = self._sampler.draw(logits, chunks, staging)
        self._latest.index_copy_(0, StepInputs.within(self._ints, shape).slots.long(), token_ids)
        self._known = {}
        self._last = DeviceStep(chunks, staging.results, logprobs, self._record())
        return self._last

    def _forward(self, shape: StepShape, *, overlapping: bool = True) -> Tensor:
        """Logits [requests, vocab], float32, of what lies in the packed inputs."""
        inputs = StepInputs.within(self._ints, shape)
        token_ids, positions = self._token_ids[: shape.tokens], self._positions[: shape.tokens]
        rows, contexts = self._rows[:, : shape.tokens], self._contexts[: shape.requests]
        sample_rows, tables = self._sample_rows[: shape.requests], self._step_tables[:, : shape.requests]
        for group in range(len(self.groups)):  # what does not differ by the group is written by each alike
            kernels.expand_tokens(
                inputs.owners,
                inputs.given,
                inputs.query_starts,
                inputs.starts,
                inputs.slots,
                self._tables[:, group],
                self._latest,
                self.pool,
                token_ids,
                positions,
                rows[group],
            )
            kernels.expand_requests(
                inputs.query_starts,
                inputs.starts,
                inputs.slots,
                self._tables[:, group],
                self.pool.shape[-2],
                contexts,
                sample_rows,
                tables[group],
            )
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            store_rows=rows.unbind(0),
            attention=[
                PagedPlan(
                    query_starts=inputs.query_starts,
                    contexts=contexts,
                    tables=table,
                    window=window,
                    few=1,
                    prefills=not shape.decodes,
                    splits=count_splits(shape.requests, self.pool.shape[1], self._reach(window)),
                )
                for window, table in zip(self.groups.windows, tables.unbind(0), strict=True)
            ],
            sample_rows=sample_rows,
            num_samples=shape.requests,
            scoring=Scoring(()),
            opened_blocks=rows[0, :0, 0],
        )
        with kernels.overlapping(overlapping and self._is_a_chain(shape)):
            return self.model.forward(batch, self.pool, _nothing)

    def _is_a_chain(self, shape: StepShape) -> bool:
        """Whether all products of such a step are kernels that wait for each other, and none is a library's."""
        from paceline.kernels.skinny_linear import has_kernel  # Triton comes with it: never on a CPU.

        weights = self.model.weights
        layer = weights.layers[0]
        of_tokens = all(has_kernel(shape.tokens, each) for each in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return of_tokens and has_kernel(shape.requests, weights.lm_head)

    def _reach(self, window: int | None) -> int:
        context = self._config.context_tokens
        return context if window is None else min(context, window)

    def _send_tables(self, staging: Staging) -> None:
        changes = self._slots.take_changes()
        if changes is None:
            return
        places, blocks = changes
        count = len(places)
        if count <= TABLE_ENTRIES:
            staged, entries = staging.entries[: 2 * count], self._entries[: 2 * count]
        else:
            # Pinned all the same, or the host would wait for the step in flight.
            staged = torch.empty(2 * count, dtype=torch.int64, pin_memory=self._on_gpu)
            entries = torch.empty(2 * count, dtype=torch.int64, device=self.pool.device)
        staged[:count].copy_(torch.from_numpy(places))
        staged[count:].copy_(torch.from_numpy(blocks))
        entries.copy_(staged, non_blocking=True)
        self._tables.view(-1).index_copy_(0, entries[:count], entries[count:].int())

    def _record(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _compute_now(self, chunks: Sequence[Chunk], tick: Callable[[], None]) -> RunningStep:
        if self._last is not None:
            sampled = iter(self._last.result().token_ids)
            # In place of what unusable logits gave, any token: what is computed from it is void.
            self._known |= {chunk.request: max(0, next(sampled)) for chunk in self._last.chunks if chunk.samples}
            self._last = None
        return super().launch(chunks, tick)


def _nothing() -> None:
    pass


def _asks_for_more(chunk: Chunk) -> bool:
    request = chunk.request
    if chunk.samples and (request.shaping is not None or request.fanout > 1):
        return True
    return request.scores is not None and chunk.start < request.num_prompt - 1
