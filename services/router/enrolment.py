"""What a worker says of itself, checked before the registry believes it."""

from __future__ import annotations

import re
from typing import Final

from paceline import wire
from paceline.config import parse_address
from paceline.errors import ConfigError, InvalidRequest, quote
from paceline.protos import common_pb2
from paceline.services.router.registry import WorkerInfo
from paceline.types import BLOCK_TOKENS, Limits, WorkerKey, check_token_ids

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_EOS_IDS: Final = 64
_MAX_LOCK_ID: Final = 256
_MAX_CLAIM_TOKEN_BYTES: Final = 64
_MAX_ADDRESS: Final = 255 + len(":65535")


def read_worker(message: common_pb2.WorkerInfo, *, model: str) -> WorkerInfo:
    """The worker, or InvalidRequest naming the field, value and limit; ConfigError where it serves another model."""
    key = read_key(message.worker)
    role = wire.role_from_proto(message.role)
    if message.model != model:
        raise ConfigError(f"model: worker {key} serves {quote(message.model)}, and this router {quote(model)}")
    limits = _read_limits(message.limits)
    eos_token_ids = tuple(message.eos_token_ids)
    if len(eos_token_ids) > _MAX_EOS_IDS:
        raise InvalidRequest("eos_token_ids", f"{len(eos_token_ids)} ids are over the limit of {_MAX_EOS_IDS}")
    check_token_ids("eos_token_ids", eos_token_ids, vocab_size=limits.vocab_size)
    if message.fingerprint.block_tokens != BLOCK_TOKENS:
        raise InvalidRequest(
            "fingerprint.block_tokens", f"{message.fingerprint.block_tokens} is not {BLOCK_TOKENS}, as blocks have here"
        )
    if len(message.lock_id) > _MAX_LOCK_ID:
        raise InvalidRequest("lock_id", f"{len(message.lock_id)} characters are over the limit of {_MAX_LOCK_ID}")
    if len(message.claim_token) > _MAX_CLAIM_TOKEN_BYTES:
        raise InvalidRequest(
            "claim_token", f"{len(message.claim_token)} bytes are over the limit of {_MAX_CLAIM_TOKEN_BYTES}"
        )
    return WorkerInfo(
        key=key,
        role=role,
        address=_read_address(message.address),
        model=message.model,
        limits=limits,
        fingerprint=message.fingerprint.SerializeToString(deterministic=True),
        eos_token_ids=eos_token_ids,
        lock_id=message.lock_id,
        claim_token=message.claim_token,
    )


def read_key(message: common_pb2.WorkerKey) -> WorkerKey:
    """A worker's key, or InvalidRequest."""
    if not _WORKER_ID.fullmatch(message.worker_id):
        raise InvalidRequest("worker_id", f"{quote(message.worker_id)} is not 1 to 128 letters, digits or any of . _ -")
    if message.epoch < 1:
        raise InvalidRequest("epoch", "0 is under the limit of 1")
    return wire.key_from_proto(message)


def worker_to_proto(info: WorkerInfo) -> common_pb2.WorkerInfo:
    """A worker for anyone's eyes: as it registered, less its claim token."""
    return common_pb2.WorkerInfo(
        worker=wire.key_to_proto(info.key),
        role=wire.role_to_proto(info.role),
        address=info.address,
        model=info.model,
        limits=wire.limits_to_proto(info.limits),
        fingerprint=common_pb2.Fingerprint.FromString(info.fingerprint),
        eos_token_ids=info.eos_token_ids,
        lock_id=info.lock_id,
    )


def peer_to_proto(info: WorkerInfo) -> common_pb2.Peer:
    """A worker for the registered workers of the other tier alone: with the claim token."""
    return common_pb2.Peer(
        worker=wire.key_to_proto(info.key),
        role=wire.role_to_proto(info.role),
        address=info.address,
        lock_id=info.lock_id,
        claim_token=info.claim_token,
    )


def _read_limits(message: common_pb2.Limits) -> Limits:
    limits = wire.limits_from_proto(message)
    for name in ("vocab_size", "context_tokens", "pool_blocks"):
        if getattr(limits, name) < 1:
            raise InvalidRequest(f"limits.{name}", f"{getattr(limits, name)} is under the limit of 1")
    return limits


def _read_address(address: str) -> str:
    if len(address) > _MAX_ADDRESS or not address.isprintable() or "/" in address:
        raise InvalidRequest("address", f"{quote(address)} is not host:port")
    try:
        parse_address("address", address)
    except ConfigError as error:
        raise InvalidRequest("address", error.message.removeprefix("address: ")) from error
    return address
