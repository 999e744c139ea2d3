"""Conversions between the wire and what only workers know: the fingerprint, and descriptions of themselves."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.kvtransfer.layout import Fingerprint
from paceline.protos import common_pb2


def fingerprint_to_proto(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    """A fingerprint for the wire."""
    groups = [
        common_pb2.KvGroup(
            layers=fingerprint.layers, kv_heads=fingerprint.kv_heads, head_dim=fingerprint.head_dim, window=window
        )
        for window in fingerprint.windows
    ]
    return common_pb2.Fingerprint(
        format_version=fingerprint.format_version,
        model=fingerprint.model,
        weights_digest=fingerprint.weights_digest,
        dtype=fingerprint.dtype,
        block_tokens=fingerprint.block_tokens,
        groups=groups,
    )


def fingerprint_from_proto(message: common_pb2.Fingerprint) -> Fingerprint:
    """A fingerprint from the wire; InvalidRequest where its KV groups are none, or have blocks of different shapes."""
    shapes = {(group.layers, group.kv_heads, group.head_dim) for group in message.groups}
    if len(shapes) != 1:
        raise InvalidRequest("fingerprint", f"its KV groups have {len(shapes)} shapes of blocks, and 1 is served")
    [(layers, kv_heads, head_dim)] = shapes
    return Fingerprint(
        format_version=message.format_version,
        model=message.model,
        weights_digest=message.weights_digest,
        dtype=message.dtype,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=message.block_tokens,
        windows=tuple(group.window if group.HasField("window") else None for group in message.groups),
    )
