"""What `UcxxTransport` says to its peers, and blocks as `ucxx` takes them."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec

from paceline.kvtransfer.region import DeviceKind, Region

Span = tuple[int, int]
"""The first of some neighbouring blocks of the target, and how many."""


class Metadata(msgspec.Struct, frozen=True, array_like=True, tag="ucxx-1"):
    """What `register` returns, encoded. Whoever has the tag may offer writes: never printed."""

    name: str
    address: bytes
    tag: int  # under which this side listens
    num_blocks: int
    block_bytes: int
    device: DeviceKind

    def __repr__(self) -> str:
        return "Metadata(...)"


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """A post, before its data."""

    writer: str
    address: bytes
    answer_tag: int
    number: int  # of the handle
    first_tag: int  # of the data; a span a tag, upwards
    spans: tuple[Span, ...]
    notification: bytes | None


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """All of an offer is there, or it never will be."""

    number: int
    error: str | None


DECODER: msgspec.msgpack.Decoder[Offer | Answer] = msgspec.msgpack.Decoder(Offer | Answer)


class _DeviceBytes:
    """Device memory in the words of `__cuda_array_interface__`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def view(region: Region, first_block: int, num_blocks: int) -> Any:
    """The blocks' own memory, as a buffer."""
    num_bytes = num_blocks * region.block_bytes
    if region.device == "cuda":
        return _DeviceBytes(region.address_of(first_block), num_bytes)
    return (ctypes.c_char * num_bytes).from_address(region.address_of(first_block))
