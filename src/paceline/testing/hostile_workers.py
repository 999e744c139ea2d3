"""Calls that a worker must refuse, made straight to it: wrong epochs, swapped and missing hand-off parameters, pools
that do not fit. Each names what was meant and what is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from paceline import wire
from paceline.client import Worker
from paceline.protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from paceline.testing.hostile import CALL_S, Case
from paceline.types import WorkerKey

_STUBS: Final[dict[str, Any]] = {"prefill": prefill_pb2_grpc.PrefillStub, "decode": decode_pb2_grpc.DecodeStub}
BAD: Final = ("INVALID_ARGUMENT", "INVALID_REQUEST")
STALE: Final = ("ABORTED", "STALE_EPOCH")


@dataclass(frozen=True)
class Tiers:
    """A prefill and a decode worker that fit together."""

    prefill: Worker
    decode: Worker
    tokens: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Claim tokens by worker id: with its own, a claim is judged by what else it says."""


def claim_tokens(router: str, decode: Worker) -> dict[str, bytes]:
    """What a decode worker hears of the prefill workers, by their ids: here one that takes no requests asks."""
    with grpc.insecure_channel(decode.address) as channel:
        request = decode_pb2.DecodeGetServerInfoRequest()
        server = _STUBS["decode"](channel).GetServerInfo(request, timeout=CALL_S).server
    info = common_pb2.WorkerInfo(
        worker=common_pb2.WorkerKey(worker_id="onlooker", epoch=1),
        role=common_pb2.ROLE_DECODE,
        address="127.0.0.1:9",
        model=server.model,
        limits=server.limits,
        fingerprint=server.fingerprint,
    )
    with grpc.insecure_channel(router) as channel:
        registered = router_pb2_grpc.RouterStub(channel).Register(
            router_pb2.RegisterRequest(info=info, draining=True), timeout=CALL_S
        )
    return {peer.worker.worker_id: peer.claim_token for peer in registered.peers}


def prefill_cases(tiers: Tiers) -> Iterator[Case]:
    """For the prefill worker's own port."""
    key, decode = tiers.prefill.key, tiers.decode
    vocab = tiers.prefill.limits.vocab_size
    other_life = WorkerKey(decode.key.worker_id, decode.key.epoch - 1)
    yield Case("Prefill, an earlier epoch", _prefill(tiers, epoch=1), *STALE, (str(key), "epoch 1 "))
    yield Case("Prefill, no epoch", _prefill(tiers, epoch=0), *STALE, (str(key), "epoch 0 "))
    yield Case("Prefill, no decode worker", _prefill(tiers, decode=common_pb2.Peer()), *STALE, ("not registered",))
    foreign = common_pb2.Peer(worker=wire.key_to_proto(WorkerKey("stranger", 7)), address="127.0.0.1:9")
    yield Case("Prefill, an unknown decode worker", _prefill(tiers, decode=foreign), *STALE, ("stranger@7",))
    earlier = common_pb2.Peer(worker=wire.key_to_proto(other_life), address=decode.address)
    parts = (str(other_life), str(decode.key))
    yield Case("Prefill, an earlier life of the decode worker", _prefill(tiers, decode=earlier), *STALE, parts)
    swapped = common_pb2.Peer(worker=wire.key_to_proto(key), address=tiers.prefill.address)
    yield Case("Prefill, itself as decode worker", _prefill(tiers, decode=swapped), *STALE, (str(key), "registered"))
    yield Case("Prefill, no reservation", _prefill(tiers, reservation_id=""), *BAD, ("reservation",))
    yield Case("Prefill, attempt 0", _prefill(tiers, attempt=0), *BAD, ("attempt",))
    yield Case("Prefill, an empty prompt", _prefill(tiers, prompt=[]), *BAD, ("prompt", "empty"))
    yield Case("Prefill, id 10**9", _prefill(tiers, prompt=[10**9]), *BAD, ("prompt", str(10**9), f"[0, {vocab})"))
    nan = common_pb2.SamplingParams(temperature=float("nan"))
    yield Case("Prefill, NaN temperature", _prefill(tiers, sampling=nan), *BAD, ("temperature", "nan"))


def prefill_for_nothing(tiers: Tiers) -> bool:
    """Asks for a prompt whose reservation nobody made; True if it was refused.

    It may be served, since the first token waits for no claim. Either way the prefill worker is to forget it soon.
    """
    with grpc.insecure_channel(tiers.prefill.address) as channel:
        try:
            _prefill(tiers)(channel)
        except grpc.RpcError:
            return True
    return False


def decode_cases(tiers: Tiers) -> Iterator[Case]:
    """For the decode worker's own port."""
    key, vocab = tiers.decode.key, tiers.decode.limits.vocab_size
    yield Case("Generate, an earlier epoch", _generate(tiers, epoch=1), *STALE, (str(key), "epoch 1 "))
    yield Case("Generate, no reservation", _generate(tiers, reservation_id=""), *BAD, ("reservation_id",))
    yield Case("Generate, an empty prompt", _generate(tiers, prompt=[]), *BAD, ("prompt", "empty"))
    yield Case("Generate, id 10**9", _generate(tiers, prompt=[10**9]), *BAD, ("prompt", str(10**9), f"[0, {vocab})"))
    zero = common_pb2.SamplingParams(top_p=0.0)
    yield Case("Generate, top_p 0", _generate(tiers, sampling=zero), *BAD, ("top_p", "0.0", "(0, 1]"))
    yield Case("StreamTokens, an earlier epoch", _stream_tokens(tiers, epoch=1), *STALE, (str(key), "epoch 1 "))
    yield Case("StreamTokens, no name", _stream_tokens(tiers, token_stream=""), *BAD, ("token_stream", "empty"))
    yield Case("ClaimWrite, an earlier epoch", _claim(tiers, decode_epoch=1), *STALE, (str(key), "epoch 1 "))
    stranger = wire.key_to_proto(WorkerKey("stranger", 7))
    yield Case("ClaimWrite by a stranger", _claim(tiers, writer=stranger), *STALE, ("stranger@7", "not registered"))
    itself = wire.key_to_proto(key)
    yield Case("ClaimWrite, itself as writer", _claim(tiers, writer=itself), *STALE, (str(key), "not registered"))
    earlier = WorkerKey(tiers.prefill.key.worker_id, tiers.prefill.key.epoch - 1)
    parts = (str(earlier), str(tiers.prefill.key))
    by_earlier = _claim(tiers, writer=wire.key_to_proto(earlier))
    yield Case("ClaimWrite by an earlier life", by_earlier, *STALE, parts)
    forged = ("claim_token", str(tiers.prefill.key))
    for token in (b"", b"\0" * 32):
        yield Case(f"ClaimWrite in another's name, {len(token)} bytes", _claim(tiers, claim_token=token), *BAD, forged)
    for attempt in (0, 2, 2**32 - 1):
        parts = (f"attempt {attempt}", "current")
        wrong = _claim(tiers, attempt=attempt)
        yield Case(f"ClaimWrite, attempt {attempt}", wrong, "ABORTED", "WRONG_ATTEMPT", parts)
    unknown = _claim(tiers, reservation_id="none-such")
    yield Case("ClaimWrite, no such reservation", unknown, "NOT_FOUND", "UNKNOWN_RESERVATION", ("none-such",))
    yield from _misfits(tiers)
    yield Case(
        "Retarget to nowhere", _retarget(to=decode_pb2.RETARGET_TO_UNSPECIFIED), *BAD, ("to", "0", "REMOTE nor LOCAL")
    )
    lost = ("NOT_FOUND", "UNKNOWN_RESERVATION", ("none-such",))
    yield Case("Retarget, no such reservation", _retarget(to=decode_pb2.RETARGET_TO_LOCAL), *lost)


def misfit_claims(tiers: Tiers, misfits: list[Worker]) -> Iterator[Case]:
    """Claims by registered prefill workers whose pools do not mean the same, each under its own name and pool."""
    for worker in misfits:
        with grpc.insecure_channel(worker.address) as channel:
            answer = _STUBS["prefill"](channel).GetServerInfo(prefill_pb2.PrefillGetServerInfoRequest())
        with grpc.insecure_channel(tiers.decode.address) as channel:
            fits = _STUBS["decode"](channel).GetServerInfo(decode_pb2.DecodeGetServerInfoRequest()).server.fingerprint
        theirs = answer.server.fingerprint
        name = next(name for name in ("weights_digest", "dtype") if getattr(theirs, name) != getattr(fits, name))
        parts = (f"{name} differs", repr(getattr(fits, name)), repr(getattr(theirs, name)))
        claim = _claim(tiers, writer=wire.key_to_proto(worker.key), change=_replaced(theirs))
        yield Case(f"ClaimWrite by {worker.key.worker_id}, {name}", claim, *_MISMATCH, parts)


def _replaced(by: common_pb2.Fingerprint) -> Callable[[Any], None]:
    def replace(fingerprint: Any) -> None:
        fingerprint.CopyFrom(by)

    return replace


def _misfits(tiers: Tiers) -> Iterator[Case]:
    """Claims by a writer whose pool does not mean the same, on a reservation that is good."""
    for name, theirs in {
        "model": "another-model",
        "weights_digest": "0" * 64,
        "dtype": "bfloat16",
        "block_tokens": 32,
        "format_version": 999,
    }.items():
        parts = (f"{name} differs", repr(theirs))
        change = _changed(name, theirs)
        yield Case(f"ClaimWrite, {name} {str(theirs)[:16]}", _claim(tiers, change=change), *_MISMATCH, parts)
    for name, number in {"layers": 99, "kv_heads": 7, "head_dim": 3}.items():
        parts = (f"{name} differs", str(number))
        change = _changed_group(name, number)
        yield Case(f"ClaimWrite, {name} {number}", _claim(tiers, change=change), *_MISMATCH, parts)
    yield Case(
        "ClaimWrite, no fingerprint",
        _claim(tiers, change=lambda p: p.Clear()),
        *BAD,
        ("fingerprint", "0 shapes of blocks"),
    )


_MISMATCH: Final = ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")


def _changed(name: str, value: object) -> Callable[[Any], None]:
    return lambda fingerprint: setattr(fingerprint, name, value)


def _changed_group(name: str, value: int) -> Callable[[Any], None]:
    return lambda fingerprint: setattr(fingerprint.groups[0], name, value)


def _prefill(tiers: Tiers, **changes: Any) -> Callable[[grpc.Channel], object]:
    good: dict[str, Any] = {
        "epoch": tiers.prefill.key.epoch,
        "prompt": [3] * 40,
        "sampling": common_pb2.SamplingParams(max_tokens=4),
        "reservation_id": uuid.uuid4().hex,
        "attempt": 1,
        "decode": common_pb2.Peer(worker=wire.key_to_proto(tiers.decode.key), address=tiers.decode.address),
    }
    request = prefill_pb2.PrefillRequest(**{**good, **changes})
    return lambda channel: _STUBS["prefill"](channel).Prefill(request, timeout=CALL_S)


def _generate(tiers: Tiers, **changes: Any) -> Callable[[grpc.Channel], object]:
    request = _good_generate(tiers, **changes)
    return lambda channel: list(_STUBS["decode"](channel).Generate(request, timeout=CALL_S))


def _good_generate(tiers: Tiers, **changes: Any) -> decode_pb2.DecodeGenerateRequest:
    good: dict[str, Any] = {
        "epoch": tiers.decode.key.epoch,
        "reservation_id": uuid.uuid4().hex,
        "prompt": [3] * 40,
        "sampling": common_pb2.SamplingParams(max_tokens=4),
    }
    return decode_pb2.DecodeGenerateRequest(**{**good, **changes})


def _claim(
    tiers: Tiers, *, change: Callable[[Any], object] = lambda fingerprint: None, **changes: Any
) -> Callable[[grpc.Channel], object]:
    """A claim on a reservation that is made for it, and given up afterwards."""

    def call(channel: grpc.Channel) -> object:
        fingerprint = _STUBS["decode"](channel).GetServerInfo(decode_pb2.DecodeGetServerInfoRequest()).server
        pool = common_pb2.Fingerprint()
        pool.CopyFrom(fingerprint.fingerprint)
        change(pool)
        with _reservation(channel, tiers) as reservation_id:
            good: dict[str, Any] = {
                "reservation_id": reservation_id,
                "attempt": 1,
                "decode_epoch": tiers.decode.key.epoch,
                "writer": wire.key_to_proto(tiers.prefill.key),
                "fingerprint": pool,
            }
            claim = {**good, **changes}
            claim.setdefault("claim_token", tiers.tokens.get(claim["writer"].worker_id, b""))
            request = decode_pb2.ClaimWriteRequest(**claim)
            return _STUBS["decode"](channel).ClaimWrite(request, timeout=CALL_S)

    return call


@contextmanager
def _reservation(channel: grpc.Channel, tiers: Tiers) -> Iterator[str]:
    request = _good_generate(tiers)
    stream = _STUBS["decode"](channel).Generate(request, timeout=CALL_S)
    try:
        assert next(stream).HasField("reserved"), "the decode worker has room for a small request"
        yield request.reservation_id
    finally:
        stream.cancel()


def _stream_tokens(tiers: Tiers, **changes: Any) -> Callable[[grpc.Channel], object]:
    good: dict[str, Any] = {"token_stream": "hostile", "epoch": tiers.decode.key.epoch}
    request = decode_pb2.StreamTokensRequest(**{**good, **changes})
    return lambda channel: next(_STUBS["decode"](channel).StreamTokens(request, timeout=CALL_S))


def _retarget(*, to: decode_pb2.RetargetTo) -> Callable[[grpc.Channel], object]:
    request = decode_pb2.RetargetRequest(reservation_id="none-such", attempt=1, to=to)
    return lambda channel: _STUBS["decode"](channel).Retarget(request, timeout=CALL_S)
