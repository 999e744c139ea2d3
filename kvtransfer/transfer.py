"""What one hand-off says on the wire: pieces, and the notification behind each part. Pure: no transport, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.kvtransfer.layout import FORMAT_VERSION
from paceline.kvtransfer.transports.transport import Piece
from paceline.types import ReservationId, TokenLogprob, WorkerKey


class PartNotification(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=f"part-{FORMAT_VERSION}"):
    """A part of a prompt's KV has landed. Parts carry indices, for they arrive in any order."""

    writer: WorkerKey
    target_epoch: int  # of the worker that it is meant for
    reservation_id: ReservationId
    attempt: int
    part: int  # from 0
    num_blocks: int  # blocks of this part; 0 where the target held them already
    last: bool = False
    total_parts: int = 0  # on the last part, else 0
    first_tokens: tuple[int, ...] = ()  # on the last part: token ids sampled from the prompt's end, one a choice
    first_logprobs: tuple[TokenLogprob, ...] = ()  # theirs, where they were asked for


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PartNotification)


def encode(notification: PartNotification) -> bytes:
    """The notification's bytes."""
    return _ENCODER.encode(notification)


def decode(payload: bytes) -> PartNotification | None:
    """The notification, or None for anything that is not one: a peer of another version, or garbage."""
    try:
        notification = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    consistent = (
        notification.total_parts == notification.part + 1 if notification.last else notification.total_parts == 0
    )
    in_range = min(notification.part, notification.num_blocks, notification.attempt, *notification.first_tokens, 0) == 0
    return notification if consistent and in_range else None


def merge(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> list[Piece]:
    """The fewest pieces that write `source_blocks[i]` to `target_blocks[i]`, in order.

    Neighbours are joined where *both* sides are contiguous. Raises `ValueError` for lists of different lengths.
    """
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks and {len(target_blocks)} target blocks")
    pieces: list[Piece] = []
    start = 0
    for end in range(1, len(source_blocks) + 1):
        run = end - start
        joins = (
            end < len(source_blocks)
            and source_blocks[end] == source_blocks[start] + run
            and target_blocks[end] == target_blocks[start] + run
        )
        if not joins:
            pieces.append(Piece(source_blocks[start], target_blocks[start], run))
            start = end
    return pieces
