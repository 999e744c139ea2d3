"""Which row of the device's block tables is whose, and what of it the device has to be told.

A slot is a place on the device for what a request's steps read again and again: its block table, and the token that it
sampled last. A request keeps its slot until another needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.engine.block_pool import BlockLease
from paceline.engine.request import Chunk, EngineRequest


@dataclass(slots=True)
class _Slot:
    index: int
    request: EngineRequest | None = None
    lease: BlockLease | None = None
    shared: int = 0
    told: list[int] = field(default_factory=list)  # of each group's table, entries from the first

    @property
    def idle(self) -> bool:
        """True where no step to come needs what it holds, but for the step's own chunks."""
        return self.request is None or not self.request.pending


class Slots:
    """`count` slots, each with a table of `width` blocks for each KV group. `count` is at least twice the chunks of a
    step.
    """

    def __init__(self, count: int, width: int, *, groups: int = 1) -> None:
        self._width = width
        self._groups = groups
        self._slots = [_Slot(index) for index in range(count)]
        self._free = self._slots[::-1]
        self._of: dict[EngineRequest, _Slot] = {}
        self._places: list[NDArray[np.int64]] = []
        self._blocks: list[int] = []

    def place(self, chunks: Sequence[Chunk]) -> list[int]:
        """The slot of each chunk's request, with all of its blocks told by `take_changes`."""
        found = [self._of.get(chunk.request) for chunk in chunks]
        if None in found:
            self._give(chunks)
        slots = [self._of[chunk.request] for chunk in chunks]
        for slot, chunk in zip(slots, chunks, strict=True):
            lease = chunk.request.lease
            if lease is not slot.lease or lease.shared != slot.shared:
                slot.lease, slot.shared, slot.told = lease, lease.shared, [0] * self._groups
            for group, (table, told) in enumerate(zip(lease.tables, slot.told, strict=True)):
                if len(table) > told:
                    first = (slot.index * self._groups + group) * self._width
                    self._places.append(np.arange(first + told, first + len(table), dtype=np.int64))
                    self._blocks += table[told:]
                    slot.told[group] = len(table)
        return [slot.index for slot in slots]

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
        """Places in the flat tables, and the blocks that belong there, since the last call; None where there are none.

        What takes a slot over is told behind the steps in flight, which are the last to read what was there.
        """
        if not self._blocks:
            return None
        changes = np.concatenate(self._places), np.array(self._blocks, dtype=np.int32)
        self._places, self._blocks = [], []
        return changes

    def _give(self, chunks: Sequence[Chunk]) -> None:
        present = {chunk.request for chunk in chunks}
        new = [chunk.request for chunk in chunks if chunk.request not in self._of]
        if len(self._free) < len(new):
            self._sweep(present)
        for request in new:
            slot = self._free.pop()
            slot.request, slot.lease = request, None
            self._of[request] = slot

    def _sweep(self, present: set[EngineRequest]) -> None:
        """Frees every slot that can be spared."""
        for slot in self._slots:
            if slot.request is not None and slot.request not in present and slot.idle:
                del self._of[slot.request]
                slot.request = slot.lease = None
                self._free.append(slot)
