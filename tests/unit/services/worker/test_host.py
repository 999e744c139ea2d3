"""What an engine process is built from."""

from __future__ import annotations

import pytest

from paceline.config import DecodeConfig
from paceline.errors import StartupError
from paceline.kvtransfer.transports.loopback import Hub
from paceline.services.worker.host import build
from paceline.types import WorkerKey


def test_a_pool_that_no_memory_holds_is_refused_with_its_size() -> None:
    config = DecodeConfig(model="dummy:tiny", pool_blocks=10**12, transport="loopback")
    with pytest.raises(StartupError, match=r"pool_blocks: 1000000000000 KV blocks take up to 7629394\.5 GiB"):
        build(config, WorkerKey("decode-0", 1), hub=Hub())
