"""What a step reads, laid out from a few numbers a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import kernels
from paceline.testing.nearness import cases
from paceline.types import BLOCK_TOKENS

REQUESTS = {
    "decodes": [(0, 1), (15, 1), (16, 1), (200, 1)],
    "a prompt": [(0, 300)],
    "mixed": [(40, 1), (0, 13), (31, 130), (7, 2)],
    "long": [(5_000, 3), (4_095, 1)],  # more blocks than a program copies at once
}
"""(tokens stored before the step, tokens in it)."""
PADDING = 3  # tokens, and requests


def _ints(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@cases({"requests": list(REQUESTS), "kv_heads": (1, 3), "layers": (1, 4)})
def test_tokens_are_laid_out_by_their_requests(
    case: dict[str, Any], backend: kernels.Backend, device: torch.device
) -> None:
    requests, (kv_heads, layers) = REQUESTS[case["requests"]], (case["kv_heads"], case["layers"])
    pool = torch.zeros(2, kv_heads, layers, 2, BLOCK_TOKENS, 16, device=device)
    width = max(-(-(start + length) // BLOCK_TOKENS) for start, length in requests)
    slots = [2 * request + 1 for request in range(len(requests))]
    tables = torch.randint(1000, (2 * len(requests) + 1, width), generator=torch.Generator().manual_seed(1))
    latest = [10_000 + slot for slot in range(len(tables))]
    owners, given, wanted, query_starts = [], [], [], [0]
    for request, (start, length) in enumerate(requests):
        for position in range(start, start + length):
            pending = position == start + length - 1  # sampled by the step in flight: only the device knows it
            owners.append(request)
            given.append(-1 if pending else position)
            block = int(tables[slots[request], position // BLOCK_TOKENS])
            row = block * kv_heads * layers * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS
            wanted.append((latest[slots[request]] if pending else position, position, row))
        query_starts.append(len(owners))
    wanted += [(0, 0, -1)] * PADDING
    ids, positions = (torch.full((len(wanted),), 77, dtype=torch.int64, device=device) for _ in range(2))
    rows = torch.full((len(wanted), 1), 77, dtype=torch.int64, device=device)
    kernels.expand_tokens(
        _ints(owners + [-1] * PADDING, device),
        _ints(given + [0] * PADDING, device),
        _ints(query_starts, device),
        _ints([start for start, _ in requests], device),
        _ints(slots, device),
        tables.int().to(device),
        _ints(latest, device, torch.int64),
        pool,
        ids,
        positions,
        rows,
    )
    assert list(zip(ids.tolist(), positions.tolist(), rows[:, 0].tolist(), strict=True)) == wanted


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_get_as_much_of_their_tables_as_they_reach(
    name: str, backend: kernels.Backend, device: torch.device
) -> None:
    requests = [*REQUESTS[name], *[(9, 0)] * PADDING]
    width = max(-(-(start + length) // BLOCK_TOKENS) for start, length in requests)
    slots = [*range(len(requests))][::-1]
    tables = torch.arange(len(requests) * width).view(-1, width)
    ends = torch.tensor([length for _, length in requests]).cumsum(0).tolist()
    contexts = torch.full((len(requests),), 77, dtype=torch.int32, device=device)
    sample_rows = torch.full((len(requests),), 77, dtype=torch.int64, device=device)
    step_tables = torch.full((len(requests), width), -5, dtype=torch.int32, device=device)
    kernels.expand_requests(
        _ints([0, *ends], device),
        _ints([start for start, _ in requests], device),
        _ints(slots, device),
        tables.int().to(device),
        BLOCK_TOKENS,
        contexts,
        sample_rows,
        step_tables,
    )
    assert contexts.tolist() == [start + length if length else 0 for start, length in requests]
    assert sample_rows.tolist() == [end - 1 for end in ends]
    for request, context in enumerate(contexts.tolist()):
        reached = -(-context // BLOCK_TOKENS)
        assert step_tables[request, :reached].tolist() == tables[slots[request], :reached].tolist()
        assert step_tables[request, reached:].tolist() == [-5] * (width - reached)
