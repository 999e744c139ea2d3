"""What a prompt's beginning is known by: chained block hashes, and the changes of a cache that is indexed by them.

A block's hash covers every token up to its end, and what else its KV depends on: two blocks of one hash hold the same
KV wherever they lie. Hashes are 128 bits of BLAKE2b without a seed, so all processes of one version agree on them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from paceline.types import BLOCK_TOKENS

HASH_BYTES: Final = 16
_VERSION: Final = b"paceline-block-1"
"""Named in every hash: another version's never match. To be changed with anything that changes a hash."""

BlockHash: TypeAlias = bytes
"""`HASH_BYTES` bytes."""


def root_hash(*, adapter: str = "", salt: str = "") -> BlockHash:
    """What the first block of a prompt is chained to.

    `adapter` names weights that change the KV, with their version. Requests with different `salt` share no blocks.
    """
    parts = [text.encode() for text in (adapter, salt)]
    digest = blake2b(digest_size=HASH_BYTES, person=_VERSION)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


ROOT: Final = root_hash()


def block_hashes(
    token_ids: Sequence[int], parent: BlockHash = ROOT, *, start: int = 0, stop: int | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks from block `start` up to block `stop` (all full ones by default), in order.

    `parent` is the hash of block `start - 1`, or a root. Token ids are in [0, 2**32). A partial block has no hash.
    """
    full = len(token_ids) // BLOCK_TOKENS
    stop = full if stop is None else min(stop, full)
    if start >= stop:
        return []
    tokens = memoryview(_as_bytes(token_ids[start * BLOCK_TOKENS : stop * BLOCK_TOKENS]))
    size = len(tokens) // (stop - start)
    hashes = []
    for at in range(0, len(tokens), size):
        parent = blake2b(parent + tokens[at : at + size], digest_size=HASH_BYTES, person=_VERSION).digest()
        hashes.append(parent)
    return hashes


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, little-endian, whatever the machine."""
    packed = array("I", token_ids)
    assert packed.itemsize == 4, "an unsigned int has four bytes on every platform that is served"
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_BIG_ENDIAN: Final = struct.pack("=I", 1) != struct.pack("<I", 1)


class KvStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks can be found from now on. `parent` is the hash before the first, None at a prompt's start."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]  # a chain


class KvRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks can be found no longer."""

    hashes: tuple[BlockHash, ...]


KvChange: TypeAlias = KvStored | KvRemoved
