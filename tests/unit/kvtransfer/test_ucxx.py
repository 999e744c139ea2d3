"""What only the `ucxx` transport does; what all do is tests/contract's to say."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports import ucxx
from paceline.kvtransfer.transports.transport import Finished, Piece
from paceline.testing.scrape import wait_for

pytestmark = pytest.mark.skipif(ucxx.available() is not None, reason="ucxx is not installed")

BLOCKS, BLOCK_BYTES = 4, 1 << 16


class Worker:
    """A pool and its transport."""

    def __init__(self, name: str) -> None:
        self.pool = ctypes.create_string_buffer(name[:1].encode() * (BLOCKS * BLOCK_BYTES), BLOCKS * BLOCK_BYTES)
        self.transport = ucxx.UcxxTransport(name)
        self.metadata = self.transport.register(Region(ctypes.addressof(self.pool), BLOCKS, BLOCK_BYTES))


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_write_that_cannot_be_sent_in_full_ends_failed(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it went: the offer, and one block of two."""
    writer, target = Worker("writer"), Worker("target")
    peer = writer.transport.connect(target.metadata)
    really, calls = writer.transport._send, 0

    def send(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > sent:
            raise RuntimeError("no buffers")
        really(*arguments)

    monkeypatch.setattr(writer.transport, "_send", send)
    handle = writer.transport.post(peer, [Piece(0, 0, 1), Piece(2, 3, 1)], b"there")

    ended: list[Finished] = []

    def has_ended() -> bool:
        assert not target.transport.poll().notifications
        ended.extend(writer.transport.poll().finished)
        return bool(ended)

    wait_for(has_ended, "the end of the write")
    [finished] = ended
    assert finished.handle == handle
    assert finished.error is not None
    assert "no buffers" in finished.error
    writer.transport.close()
    target.transport.close()
