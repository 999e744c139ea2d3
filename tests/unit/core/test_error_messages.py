"""Errors on the wire: what their messages quote may be of any length, and they arrive all the same."""

from __future__ import annotations

import grpc
import pytest

from paceline import wire
from paceline.errors import InvalidRequest, UnknownReservation
from paceline.protos import decode_pb2, decode_pb2_grpc


class Refusing(decode_pb2_grpc.DecodeServicer):
    async def Abort(
        self, request: decode_pb2.DecodeAbortRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.DecodeAbortResponse:
        async with wire.answering_errors(context):
            raise UnknownReservation(f"reservation {request.reservation_id} is unknown")


@pytest.mark.parametrize("value", ["r", "☃" * 1_000, "🦊" * 100_000, "x" * 1_000_000])
async def test_an_error_that_quotes_a_long_value_arrives_as_what_it_is(value: str) -> None:
    server = grpc.aio.server(options=wire.SERVER_OPTIONS)
    decode_pb2_grpc.add_DecodeServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await decode_pb2_grpc.DecodeStub(channel).Abort(decode_pb2.DecodeAbortRequest(reservation_id=value))
    finally:
        await server.stop(None)
    error = wire.error_from_rpc(refusal.value)
    assert isinstance(error, UnknownReservation)
    assert error.message.startswith(f"reservation {value[:300]}")
    assert ("cut" in error.message) is (len(value) > 1)


def test_a_message_that_is_short_enough_is_told_whole() -> None:
    error = InvalidRequest("text", "é" * 700)
    assert wire._told(error) == error.message
