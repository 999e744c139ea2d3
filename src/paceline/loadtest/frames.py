"""What a generator process and its parent say to each other, over its standard input and output.

A frame is a length of four bytes, big-endian, and so many bytes of msgpack.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from paceline.loadtest.config import BenchConfig, Slo
from paceline.loadtest.outcome import Outcome
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.target import TargetInfo

_LENGTH_BYTES: Final = 4


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Parent's first: what to do, as process `share` of `shares`."""

    config: BenchConfig
    info: TargetInfo
    slo: Slo | None
    salt: str
    share: int
    shares: int
    warm: bool  # whether to send the warm-up


class Start(msgspec.Struct, frozen=True, tag=True):
    """Parent's second: begin at this reading of the monotonic clock."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Parent's: end what is under way, and report."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Child's first: connected and warmed up."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Child's, several times a second: counts since the start."""

    sent: int
    ended: int
    failed: int
    bad: int  # of those ended, against the SLO
    tokens: int  # of answers that ended


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Child's last."""

    outcomes: list[Outcome]
    cpu_s: float
    loop_lag_s: Distribution | None  # how late a timer's turn comes: what arrivals may be stamped too late


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Child's, in place of any other: an error that ends the run."""

    reason: str
    message: str
    metadata: dict[str, str]


ToChild = Assignment | Start | Stop
ToParent = Ready | Progress | Report | Broken


def frame(message: ToChild | ToParent) -> bytes:
    """The bytes of a message."""
    body = msgspec.msgpack.encode(message, enc_hook=str)  # of paths
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_from_parent(reader: asyncio.StreamReader) -> ToChild:
    """The parent's next message. Raises IncompleteReadError where the parent is gone."""
    return _to_child.decode(await _read(reader))


async def read_from_child(reader: asyncio.StreamReader) -> ToParent:
    """A child's next message. Raises IncompleteReadError where the child is gone."""
    return _to_parent.decode(await _read(reader))


def write(file: BinaryIO, message: ToParent) -> None:
    """Writes a message, and waits until it is taken."""
    file.write(frame(message))
    file.flush()


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return await reader.readexactly(length)


def _path(kind: type, value: object) -> object:
    assert kind is Path, f"no message has a {kind}"
    return Path(str(value))


_to_child: Final = msgspec.msgpack.Decoder(ToChild, dec_hook=_path)
_to_parent: Final = msgspec.msgpack.Decoder(ToParent)
