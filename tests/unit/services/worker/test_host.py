"""What an engine process is built from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import DecodeConfig
from paceline.engine import weights
from paceline.errors import StartupError
from paceline.kvtransfer.transports.loopback import Hub
from paceline.services.worker.host import build
from paceline.types import WorkerKey


def test_a_pool_that_no_memory_holds_is_refused_with_its_size() -> None:
    config = DecodeConfig(model="dummy:tiny", pool_blocks=10**12, transport="loopback")
    with pytest.raises(StartupError, match=r"pool_blocks: 1000000000000 KV blocks take up to 7629394\.5 GiB"):
        build(config, WorkerKey("decode-0", 1), hub=Hub())


def test_a_model_whose_first_step_gives_nan_is_refused_with_its_name_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    load = weights.load

    def damaged(*args: Any, **settings: Any) -> weights.Weights:
        loaded = load(*args, **settings)
        loaded.final_norm.fill_(torch.nan)
        return loaded

    monkeypatch.setattr(weights, "load", damaged)
    config = DecodeConfig(model="dummy:tiny", pool_blocks=8, transport="loopback")
    with pytest.raises(StartupError, match=r"dummy:tiny as float32: the first step's logits are NaN or infinite"):
        build(config, WorkerKey("decode-0", 1), hub=Hub())
