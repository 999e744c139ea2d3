"""Ids that are encoded once for several messages."""

from __future__ import annotations

import pytest

from paceline.protos import decode_pb2, prefill_pb2, router_pb2
from paceline.wire import EncodedIds

PREFILL = prefill_pb2.PrefillRequest
DECODE = decode_pb2.DecodeGenerateRequest


@pytest.mark.parametrize("ids", [[0], [7, 128, 2**32 - 1], list(range(5_000)), []])
def test_both_workers_read_the_ids_beside_the_other_fields(ids: list[int]) -> None:
    encoded = EncodedIds(router_pb2.TokenIds(ids=ids))
    prefill = PREFILL(request_id="r", attempt=3).SerializeToString() + encoded.as_field(PREFILL.PROMPT_FIELD_NUMBER)
    decode = DECODE(request_id="r", cache_salt="s").SerializeToString() + encoded.as_field(DECODE.PROMPT_FIELD_NUMBER)
    assert PREFILL.FromString(prefill) == PREFILL(request_id="r", attempt=3, prompt=ids)
    assert DECODE.FromString(decode) == DECODE(request_id="r", cache_salt="s", prompt=ids)


def test_a_field_that_a_client_slipped_in_reaches_no_worker() -> None:
    forged = router_pb2.TokenIds.FromString(
        router_pb2.TokenIds(ids=[5]).SerializeToString() + PREFILL(attempt=9).SerializeToString()
    )
    field = EncodedIds(forged).as_field(PREFILL.PROMPT_FIELD_NUMBER)
    assert PREFILL.FromString(field) == PREFILL(prompt=[5])
