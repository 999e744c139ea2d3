"""What workers say, read into the router's own words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline.errors import EngineError
from paceline.protos import common_pb2, decode_pb2, prefill_pb2
from paceline.services.router.from_proto import decode_event, prefill_reply

IMPOSSIBLE = Duration(seconds=2**63 - 1)
LOAD = common_pb2.Load(tick_age=IMPOSSIBLE)
TRANSFER = common_pb2.Transfer(duration=IMPOSSIBLE)


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (lambda: prefill_reply(prefill_pb2.PrefillResponse(duration=IMPOSSIBLE)), "duration"),
        (lambda: prefill_reply(prefill_pb2.PrefillResponse(load=LOAD)), "load.tick_age"),
        (lambda: prefill_reply(prefill_pb2.PrefillResponse(transfer=TRANSFER)), "transfer.duration"),
        (lambda: _event(reserved=decode_pb2.Reserved(load=LOAD)), "load.tick_age"),
        (lambda: _event(finish=decode_pb2.DecodeFinish(transfer=TRANSFER)), "transfer.duration"),
    ],
)
def test_a_time_that_cannot_be_is_the_workers_fault_and_not_the_clients(read: Callable[[], object], field: str) -> None:
    with pytest.raises(EngineError, match=rf"a worker sent what cannot be: {field}: 9\.2.*10000000000 s"):
        read()


def _event(**said: decode_pb2.Reserved | decode_pb2.DecodeFinish) -> object:
    return decode_event(decode_pb2.DecodeGenerateResponse(**said))
