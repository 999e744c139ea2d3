"""Copies between two pools that are known by their addresses alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import kernels
from paceline.testing.nearness import cases

CUTS = (
    kernels.ScatterCut(programs=1),
    kernels.ScatterCut(programs=5, piece_bytes=2**20, stages=2),
    kernels.ScatterCut(programs=1, chunk_bytes=8192, piece_bytes=65536, warps=4, stages=3, streaming=True),
    kernels.ScatterCut(),
)
SCATTER = {"block_bytes": (16, 48, 32768, 65552, 368640), "pairs": (1, 3, 6), "cut": CUTS}


def _pool(device: torch.device, blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
    words = torch.randint(2**31, (blocks, block_bytes // 4), generator=torch.Generator().manual_seed(seed))
    return words.to(torch.int32).to(device)


@pytest.fixture
def place(backend: kernels.Backend, device: torch.device) -> torch.device:
    """Where the form that is tried finds its memory: the twin copies the host's, whatever the device."""
    return torch.device("cpu") if backend is kernels.Backend.TWIN else device


@cases(SCATTER)
def test_blocks_arrive_bit_for_bit_and_no_other_block_changes(case: dict[str, Any], place: torch.device) -> None:
    block_bytes, num_pairs, cut = case.values()
    source, target = _pool(place, 9, block_bytes, 1), _pool(place, 7, block_bytes, 2)
    pairs = torch.tensor([[8, 0], [0, 5], [3, 6], [4, 2], [4, 1], [5, 4]][:num_pairs], dtype=torch.int32, device=place)
    wanted = target.clone()
    wanted[pairs[:, 1].long()] = source[pairs[:, 0].long()]
    before = source.clone()
    kernels.scatter_blocks(pairs, source.data_ptr(), target.data_ptr(), block_bytes, cut)
    assert torch.equal(target, wanted)
    assert torch.equal(source, before)


def test_no_pairs_change_nothing(place: torch.device) -> None:
    source, target = _pool(place, 2, 64, 1), _pool(place, 2, 64, 2)
    before = target.clone()
    none = torch.zeros(0, 2, dtype=torch.int32, device=place)
    kernels.scatter_blocks(none, source.data_ptr(), target.data_ptr(), 64)
    assert torch.equal(target, before)


def test_addresses_and_sizes_that_are_not_aligned_are_refused(place: torch.device) -> None:
    none = torch.zeros(0, 2, dtype=torch.int32, device=place)
    with pytest.raises(ValueError, match="40 is no multiple of 16"):
        kernels.scatter_blocks(none, 1024, 4096, 40)
    with pytest.raises(ValueError, match="1028 is no multiple of 16"):
        kernels.scatter_blocks(none, 1028, 4096, 64)


def test_pieces_are_smaller_where_there_is_little_to_copy() -> None:
    from paceline.kernels.scatter import chunks_of_piece

    cut = kernels.ScatterCut(programs=32, chunk_bytes=32768, piece_bytes=2**18)
    assert [chunks_of_piece(pairs, 2 << 20, cut) for pairs in (0, 1, 3, 8, 16, 2048)] == [1, 1, 1, 4, 8, 8]
    assert chunks_of_piece(2048, 2 << 20, kernels.ScatterCut()) == 1
