"""Shapes of clusters, and which device each of their workers computes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_DISAGGREGATED = re.compile(r"([1-9][0-9]*)P([1-9][0-9]*)D", re.IGNORECASE)
_COLOCATED = re.compile(r"([1-9][0-9]*)C", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """So many workers of each tier. Without a prefill worker, decode workers compute the prompts as well."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2P1D`, or `3C` for three colocated replicas. Raises ValueError."""
        if found := _DISAGGREGATED.fullmatch(text.strip()):
            return cls(int(found[1]), int(found[2]))
        if found := _COLOCATED.fullmatch(text.strip()):
            return cls(0, int(found[1]))
        raise ValueError(f"{text!r} is no shape such as 2P1D, or 3C for three replicas that do both")

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode}C"

    @property
    def workers(self) -> int:
        """Of both tiers."""
        return self.prefill + self.decode


@dataclass(frozen=True)
class Seats:
    """The device of each worker."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @property
    def devices(self) -> int:
        """How many devices are in use."""
        return len({*self.prefill, *self.decode})

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs compute."""
        return self.decode[0] != "cpu"

    def flags(self) -> list[str]:
        """What `paceline up` is to be told."""
        flags = [f"--decode-devices={','.join(self.decode)}"]
        return flags + ([f"--prefill-devices={','.join(self.prefill)}"] if self.prefill else [])


def seat(shape: Shape, devices: Sequence[str], per_device: int) -> Seats | None:
    """Fills one device after another with `per_device` workers; a CPU takes any number. None where not all fit.

    The tiers take turns, so that a prefill and a decode worker share a device rather than two of a kind.
    """
    if list(devices) == ["cpu"]:
        places = ["cpu"] * shape.workers
    else:
        places = [device for device in devices for _ in range(per_device)]
    if len(places) < shape.workers:
        return None
    seats: dict[str, list[str]] = {"prefill": [], "decode": []}
    left = {"prefill": shape.prefill, "decode": shape.decode}
    tier = "prefill"
    for place in places[: shape.workers]:
        if not left[tier]:
            tier = "decode" if tier == "prefill" else "prefill"
        seats[tier].append(place)
        left[tier] -= 1
        tier = "decode" if tier == "prefill" else "prefill"
    return Seats(tuple(seats["prefill"]), tuple(seats["decode"]))
