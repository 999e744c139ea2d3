"""What workers say of themselves is checked."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequest, PacelineError
from paceline.protos import common_pb2
from paceline.services.router.calls import target_to_proto
from paceline.services.router.enrolment import peer_to_proto, read_worker, worker_to_proto

GOOD: dict[str, Any] = {
    "worker": common_pb2.WorkerKey(worker_id="decode-0.a_B", epoch=1),
    "role": common_pb2.ROLE_DECODE,
    "address": "10.0.0.1:7090",
    "model": "m",
    "limits": common_pb2.Limits(vocab_size=512, context_tokens=2_048, pool_blocks=100),
    "fingerprint": common_pb2.Fingerprint(
        format_version=1, model="m", block_tokens=16, groups=[common_pb2.KvGroup(layers=2, kv_heads=2, head_dim=16)]
    ),
    "eos_token_ids": [2],
    "lock_id": "host/boot/1:2",
}


def message(**changes: Any) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(**{**GOOD, **changes})


@pytest.mark.parametrize("address", ["10.0.0.1:7090", "decode.example:1", "[::1]:65535"])
def test_a_worker_comes_back_as_it_registered(address: str) -> None:
    assert worker_to_proto(read_worker(message(address=address), model="m")) == message(address=address)


def test_a_claim_token_is_for_peers_alone() -> None:
    info = read_worker(message(claim_token=b"secret"), model="m")
    assert (peer_to_proto(info).claim_token, peer_to_proto(info).lock_id) == (b"secret", "host/boot/1:2")
    assert worker_to_proto(info) == message()
    assert target_to_proto(info).claim_token == b""
    assert "secret" not in f"{info!r} {info} {[info]}"


def test_equal_fingerprints_compare_equal_and_others_do_not() -> None:
    first = read_worker(message(), model="m").fingerprint
    assert read_worker(message(address="h:2"), model="m").fingerprint == first
    other = common_pb2.Fingerprint(format_version=1, model="m", block_tokens=16, dtype="bfloat16")
    assert read_worker(message(fingerprint=other), model="m").fingerprint != first


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "other"}, ConfigError, "serves 'other', and this router 'm'"),
        ({"worker": common_pb2.WorkerKey(worker_id="a b", epoch=1)}, InvalidRequest, "worker_id"),
        ({"worker": common_pb2.WorkerKey(worker_id="x" * 129, epoch=1)}, InvalidRequest, "worker_id"),
        ({"worker": common_pb2.WorkerKey(worker_id="a")}, InvalidRequest, "epoch"),
        ({"worker": None}, InvalidRequest, "worker_id"),
        ({"role": common_pb2.ROLE_UNSPECIFIED}, InvalidRequest, "role"),
        ({"role": 77}, InvalidRequest, "role: 77"),
        ({"address": ""}, InvalidRequest, "address"),
        ({"address": "host"}, InvalidRequest, "address"),
        ({"address": "host:0"}, InvalidRequest, "address"),
        ({"address": "host:99999"}, InvalidRequest, "address"),
        ({"address": "unix:///tmp/x:1"}, InvalidRequest, "address"),
        ({"address": "h" * 300 + ":1"}, InvalidRequest, "address"),
        ({"address": "ho\nst:1"}, InvalidRequest, "address"),
        ({"limits": None}, InvalidRequest, "limits.vocab_size: 0"),
        ({"limits": common_pb2.Limits(vocab_size=1, context_tokens=1)}, InvalidRequest, "limits.pool_blocks: 0"),
        ({"eos_token_ids": [512]}, InvalidRequest, "eos_token_ids"),
        ({"eos_token_ids": [1] * 65}, InvalidRequest, "65 ids"),
        ({"lock_id": "x" * 257}, InvalidRequest, "lock_id: 257 characters"),
        ({"claim_token": b"x" * 65}, InvalidRequest, "claim_token: 65 bytes"),
        ({"fingerprint": None}, InvalidRequest, "block_tokens: 0"),
        ({"fingerprint": common_pb2.Fingerprint(block_tokens=32)}, InvalidRequest, "block_tokens: 32"),
    ],
)
def test_garbage_is_refused_by_name_and_value(changes: dict[str, Any], error: type[PacelineError], said: str) -> None:
    with pytest.raises(error, match=said):
        read_worker(message(**changes), model="m")
