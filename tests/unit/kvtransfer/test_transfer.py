from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.kvtransfer.transfer import PartNotification, decode, encode, merge
from paceline.kvtransfer.transports.transport import Piece
from paceline.types import ReservationId, WorkerKey

PART = PartNotification(
    writer=WorkerKey("prefill-0", 3),
    target_epoch=5,
    reservation_id=ReservationId("r-1"),
    attempt=2,
    part=1,
    num_blocks=7,
    last=True,
    total_parts=2,
    first_tokens=(11, 12),
)

block_pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


@given(block_pairs)
def test_pieces_write_each_source_block_to_its_target_block_in_order(pairs: list[tuple[int, int]]) -> None:
    pieces = merge([source for source, _ in pairs], [target for _, target in pairs])
    written = [(p.source_block + i, p.target_block + i) for p in pieces for i in range(p.num_blocks)]
    assert written == pairs


@given(block_pairs)
def test_no_two_neighbouring_pieces_could_have_been_one(pairs: list[tuple[int, int]]) -> None:
    pieces = merge([source for source, _ in pairs], [target for _, target in pairs])
    for one, other in pairwise(pieces):
        source_follows = other.source_block == one.source_block + one.num_blocks
        target_follows = other.target_block == one.target_block + one.num_blocks
        assert not (source_follows and target_follows)


def test_neighbours_merge_only_where_both_sides_are_contiguous() -> None:
    assert merge([4, 5, 6, 9], [14, 15, 20, 21]) == [Piece(4, 14, 2), Piece(6, 20, 1), Piece(9, 21, 1)]
    assert merge([], []) == []


def test_blocks_without_a_counterpart_are_refused() -> None:
    with pytest.raises(ValueError, match="2 source blocks and 1 target blocks"):
        merge([1, 2], [1])


def test_a_notification_survives_the_wire() -> None:
    assert decode(encode(PART)) == PART


@given(st.binary(max_size=200))
def test_garbage_is_no_notification_and_never_raises(payload: bytes) -> None:
    assert decode(payload) is None


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_notification_is_read_or_refused_and_never_raises(position: int, value: int) -> None:
    payload = bytearray(encode(PART))
    payload[position % len(payload)] = value
    decode(bytes(payload))


@pytest.mark.parametrize(
    "change",
    [
        {"part": -1, "total_parts": 0},
        {"num_blocks": -1},
        {"attempt": -2},
        {"first_tokens": (5, -1)},
        {"total_parts": 3},
        {"last": False},
    ],
)
def test_a_notification_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    assert decode(encode(msgspec.structs.replace(PART, **change))) is None


def test_a_notification_of_another_version_is_refused() -> None:
    assert decode(encode(PART).replace(b"part-1", b"part-9")) is None
