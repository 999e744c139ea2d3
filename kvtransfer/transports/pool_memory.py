"""What a transport that copies for itself needs of a kind of memory: to offer a pool, map a peer's, and copy into it.

`CudaMemory` is the real one; `paceline.testing.host_memory` does the same between processes without a GPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.kvtransfer.region import Region

Pairs = npt.NDArray[np.int32]
"""[pairs, 2]: a block here, and the peer's block that it is copied to."""


class CopyFailed(Exception):
    """A copy ended without its data being with the peer. It touches neither side's memory any more."""


class Copy(Protocol):
    """A copy under way."""

    @property
    def seconds(self) -> float | None:
        """How long data moved, of one that is done; None where nobody knows."""
        ...

    def done(self) -> bool:
        """True when all of it is in the peer's memory, for whatever reads it there from now on. Never waits.

        Raises `CopyFailed` where it never will be. Not to be asked again after either.
        """
        ...


class Mapping(Protocol):
    """A peer's pool, as this process reaches it."""

    def close(self) -> None:
        """Lets go of it, so that a dead peer's memory comes back. Only without copies under way."""
        ...


class PoolMemory(Protocol):
    """One process's pool of one kind of memory, and its way into others'."""

    def export(self, region: Region) -> bytes:
        """Makes `region` the source of copies, and returns what peers `map`. `StartupError` where it cannot be."""
        ...

    def map(self, exported: bytes, num_bytes: int) -> Mapping:
        """Reaches a peer's pool of so many bytes. `TransferFailed` where the bytes are no such thing, or it cannot."""
        ...

    def copy(self, target: Mapping, pairs: Pairs, *, in_stream: bool = False) -> Copy:
        """Starts copying blocks whose contents are there, or with `in_stream` will be when all work is done that this
        thread has launched on the device. Raises `CopyFailed` where it cannot.
        """
        ...

    def finish(self) -> None:
        """Waits until no copy is under way."""
        ...
