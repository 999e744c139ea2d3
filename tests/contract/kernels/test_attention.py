"""Attention over the paged pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import kernels
from paceline.kernels.paged_plan import FEW_QUERIES, SPLIT_TOKENS, PagedPlan, count_splits
from paceline.testing.nearness import DTYPES, assert_near, cases, error
from paceline.testing.paged import LAYER, PagedCase

BATCHES = {
    "decodes": [(0, 1), (15, 1), (16, 1), (70, 1)],
    "long decode": [(SPLIT_TOKENS + 40, 1), (3, 1)],
    "verifies": [(0, 9), (33, 2), (5, 5)],
    "prompts": [(0, 37), (0, 10)],
    "chunks": [(50, 21), (16, 16)],
    "mixed": [(40, 1), (0, 13), (31, 4), (18, 30), (2, 1)],
}
SHAPES = {
    "batch": list(BATCHES),
    "dtype": DTYPES,
    "group": range(1, 9),
    "head_dim": (16, 64, 80, 96, 128, 256),
    "window": (None, 7, 16, 40),
}


def _case(device: torch.device, batch: str, group: int, **shape: Any) -> PagedCase:
    # One and two KV heads in turn: either keeps the interpreter quick, and two would find a mixed-up stride.
    return PagedCase.random(BATCHES[batch], kv_heads=1 + group % 2, group=group, device=device, **shape)


def _attend(case: PagedCase, window: int | None = None, scale: float | None = None) -> torch.Tensor:
    plan = kernels.plan_attention(case.starts, case.lengths, case.tables, case.pool, window)
    return kernels.attention(case.qkv, case.pool, LAYER, plan, scale)


@cases(SHAPES)
def test_attention_is_that_of_float64(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    paged = _case(device, **case)
    assert_near(_attend(paged, case["window"]), paged.wanted)


def test_the_scale_replaces_the_usual_one(backend: kernels.Backend, device: torch.device) -> None:
    for batch in ("decodes", "mixed"):
        shape = {"group": 2, "head_dim": 64, "dtype": torch.float32, "scale": 0.3}
        paged = _case(device, batch, **shape)
        assert_near(_attend(paged, scale=0.3), paged.wanted)
        assert error(_attend(paged), paged.wanted) > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_off_by_one_is_noticed(dtype: torch.dtype, backend: kernels.Backend, device: torch.device) -> None:
    for batch in ("decodes", "verifies", "chunks"):
        paged = _case(device, batch, group=2, head_dim=64, dtype=dtype, window=7)
        for wrong in (6, 8):
            # Where an entry has slid out of one window, another may read it: rows of NaN are far off as well.
            assert error(_attend(paged, wrong), paged.wanted) > 2


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("window", [None, 20])
def test_the_number_of_splits_does_not_matter(
    splits: int, window: int | None, triton_backend: None, device: torch.device
) -> None:
    """Many of them are empty, some rows of others see nothing, and what empty ones leave is never read."""
    requests = [(2 * SPLIT_TOKENS + 5, 9), (0, 1), (SPLIT_TOKENS - 1, 3)]
    paged = PagedCase.random(
        requests, kv_heads=2, group=3, head_dim=64, dtype=torch.float32, device=device, window=window
    )
    plan = kernels.plan_attention(paged.starts, paged.lengths, paged.tables, paged.pool, window)
    assert isinstance(plan, PagedPlan)
    found = kernels.attention(paged.qkv, paged.pool, LAYER, replace(plan, splits=splits))
    assert_near(found, paged.wanted)


def test_requests_without_tokens_are_padding(triton_backend: None, device: torch.device) -> None:
    """As in a captured graph: fewer requests than it has room for, tables wider than needed, a looser bound."""
    paged = PagedCase.random([(20, 1), (300, 1)], kv_heads=2, group=4, head_dim=64, dtype=torch.float32, device=device)
    plan = kernels.plan_attention(paged.starts, paged.lengths, paged.tables, paged.pool)
    assert isinstance(plan, PagedPlan)
    wide = torch.full((5, plan.tables.shape[1] + 4), -1, dtype=torch.int32, device=device)
    wide[:2, : plan.tables.shape[1]] = plan.tables
    ends = torch.full((3,), 2, dtype=torch.int32, device=device)
    padded = replace(
        plan,
        query_starts=torch.cat([plan.query_starts, ends]),
        contexts=torch.cat([plan.contexts, torch.zeros_like(ends)]),
        tables=wide,
        few=FEW_QUERIES,
        prefills=True,
        splits=4,
    )
    assert_near(kernels.attention(paged.qkv, paged.pool, LAYER, padded), paged.wanted)


def test_a_decode_alone_and_among_others_is_the_same(triton_backend: None, device: torch.device) -> None:
    """With an equal number of splits, to the bit: no sum's order hangs on the batch."""
    requests = [(600, 1), (3, 1), (77, 1)]
    paged = PagedCase.random(requests, kv_heads=1, group=4, head_dim=64, dtype=torch.bfloat16, device=device)
    plan = kernels.plan_attention(paged.starts, paged.lengths, paged.tables, paged.pool)
    assert isinstance(plan, PagedPlan)
    together = kernels.attention(paged.qkv, paged.pool, LAYER, replace(plan, splits=3))
    for row in range(len(requests)):
        alone = kernels.plan_attention([paged.starts[row]], [1], [paged.tables[row]], paged.pool)
        assert isinstance(alone, PagedPlan)
        found = kernels.attention(paged.qkv[row : row + 1], paged.pool, LAYER, replace(alone, splits=3))
        assert torch.equal(found, together[row : row + 1])


def test_splits_fill_a_gpu_and_no_more() -> None:
    assert count_splits(1, 8, SPLIT_TOKENS) == 1
    assert count_splits(1, 8, 8192) == 64
    assert count_splits(16, 8, 8192) == 4
    assert count_splits(64, 8, 8192) == 1
    assert count_splits(256, 8, 8192) == 1
    assert count_splits(0, 8, 0) == 1
