"""Block hashes: equal for equal beginnings, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from paceline.prefix import HASH_BYTES, ROOT, block_hashes, root_hash
from paceline.types import BLOCK_TOKENS

TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 3))


def test_each_full_block_has_a_hash_and_a_partial_one_has_none() -> None:
    hashes = block_hashes(TOKENS)
    assert [len(each) for each in hashes] == [HASH_BYTES] * 5
    assert len(set(hashes)) == 5
    assert block_hashes(TOKENS[: BLOCK_TOKENS - 1]) == []


def test_a_chain_can_be_continued_anywhere() -> None:
    hashes = block_hashes(TOKENS)
    assert block_hashes(TOKENS, hashes[1], start=2) == hashes[2:]
    assert block_hashes(TOKENS, hashes[1], start=2, stop=4) == hashes[2:4]
    assert block_hashes(TOKENS, stop=2) == hashes[:2]
    assert block_hashes(TOKENS, stop=99) == hashes
    assert block_hashes(TOKENS, hashes[4], start=5) == []


def test_another_root_shares_no_hash() -> None:
    roots = [ROOT, root_hash(salt="a"), root_hash(adapter="a"), root_hash(adapter="a", salt="a"), root_hash(salt="aa")]
    every = {each for root in roots for each in block_hashes(TOKENS, root)}
    assert len(every) == len(roots) * 5
    assert root_hash() == ROOT


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64), st.integers(0, 63), st.integers(1, 2**31))
def test_a_changed_token_changes_every_hash_from_its_block_on(tokens: list[int], at: int, by: int) -> None:
    changed = list(tokens)
    changed[at] = (changed[at] + by) % 2**32
    same = [a == b for a, b in zip(block_hashes(tokens), block_hashes(changed), strict=True)]
    assert same == [index < at // BLOCK_TOKENS for index in range(4)]


def test_hashes_are_the_same_in_every_process_and_for_ever() -> None:
    """A changed value here is another version of the hash: its name has to change with it."""
    code = "from paceline.prefix import block_hashes; print(block_hashes(list(range(16)))[0].hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == block_hashes(list(range(16)))[0].hex() == GOLDEN


GOLDEN = "0dd64e32bf23d5f35a1c10ce5014459d"
