"""Conversions between the wire and what only workers know: the fingerprint, and descriptions of themselves."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.kvtransfer.layout import Fingerprint
from paceline.protos import common_pb2


def fingerprint_to_proto(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    """A fingerprint for the wire."""
    group = common_pb2.KvGroup(layers=fingerprint.layers, kv_heads=fingerprint.kv_heads, head_dim=fingerprint.head_dim)
    return common_pb2.Fingerprint(
        format_version=fingerprint.format_version,
        model=fingerprint.model,
        weights_digest=fingerprint.weights_digest,
        dtype=fingerprint.dtype,
        block_tokens=fingerprint.block_tokens,
        groups=[group],
    )


def fingerprint_from_proto(message: common_pb2.Fingerprint) -> Fingerprint:
    """A fingerprint from the wire; InvalidRequest where it has not exactly the one KV group of this version."""
    if len(message.groups) != 1:
        raise InvalidRequest("fingerprint", f"{len(message.groups)} KV groups were named, and 1 is served")
    [group] = message.groups
    return Fingerprint(
        format_version=message.format_version,
        model=message.model,
        weights_digest=message.weights_digest,
        dtype=message.dtype,
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        block_tokens=message.block_tokens,
    )
