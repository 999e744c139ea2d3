"""In batch-invariant mode a row is the same, to the bit, alone and among others, as a decode and within a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline import kernels
from paceline.kernels.paged_plan import FEW_QUERIES
from paceline.testing.nearness import assert_near
from paceline.testing.paged import LAYER, PagedCase


@pytest.fixture(autouse=True)
def invariant(triton_backend: None) -> Iterator[None]:
    kernels.set_batch_invariant(True)
    yield
    kernels.set_batch_invariant(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 2100), (300, 64), (128, 1024)])
def test_a_row_of_a_product_is_what_it_is_alone(
    dtype: torch.dtype, outputs: int, inputs: int, device: torch.device
) -> None:
    source = torch.Generator().manual_seed(outputs)
    x = torch.randn(200, inputs, generator=source).to(dtype).to(device)
    weight = (torch.randn(outputs, inputs, generator=source) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(outputs, generator=source).to(dtype).to(device)
    together = kernels.linear(x, weight, bias)
    assert_near(together, x.double() @ weight.double().T + bias.double())
    for rows in (slice(0, 1), slice(63, 64), slice(199, 200), slice(5, 69), slice(100, 117)):
        assert torch.equal(kernels.linear(x[rows], weight, bias), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_token_is_what_it_is_alone(dtype: torch.dtype, device: torch.device) -> None:
    """Beside other requests, in a chunk of any size, and however many programs could share its context."""
    requests = [(90, 1), (0, 20), (33, 12), (200, 1), (15, FEW_QUERIES)]
    case = PagedCase.random(requests, kv_heads=2, group=4, head_dim=64, dtype=dtype, device=device)
    plan = kernels.plan_attention(case.starts, case.lengths, case.tables, case.pool)
    together = kernels.attention(case.qkv, case.pool, LAYER, plan)
    assert_near(together, case.wanted)
    first = 0
    for start, length, table in zip(case.starts, case.lengths, case.tables, strict=True):
        for token in {0, length // 2, length - 1}:
            alone = kernels.plan_attention([start + token], [1], [table], case.pool)
            row = slice(first + token, first + token + 1)
            assert torch.equal(kernels.attention(case.qkv[row], case.pool, LAYER, alone), together[row])
        first += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("window", [None, 40, 70])
def test_attention_does_not_hang_on_where_a_chunk_begins(
    window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = 210
    shape = {"kv_heads": 1, "group": group, "head_dim": 64, "dtype": dtype, "device": device, "window": window}
    case = PagedCase.random([(0, tokens)], **shape)
    plan = kernels.plan_attention([0], [tokens], case.tables, case.pool, window)
    together = kernels.attention(case.qkv, case.pool, LAYER, plan)
    assert_near(together, case.wanted)
    chunks = [(first, 1) for first in range(0, tokens, 1 if device.type == "cuda" else 21)]
    chunks += [(1, 31), (5, 64), (31, 33), (63, 65), (64, 130), (100, 7), (127, 83), (33, 110), (207, 3)]
    for first, length in chunks:
        alone = kernels.plan_attention([first], [length], case.tables, case.pool, window)
        rows = slice(first, first + length)
        assert torch.equal(kernels.attention(case.qkv[rows], case.pool, LAYER, alone), together[rows])


def test_norms_activations_and_draws_are_so_anyway(device: torch.device) -> None:
    kernels.set_batch_invariant(False)
    source = torch.Generator().manual_seed(2)
    rows, width = (12, 1100) if device.type == "cpu" else (64, 3000)  # interpreted: what takes seconds
    x = torch.randn(rows, width, generator=source).to(torch.bfloat16).to(device)
    weight = torch.randn(width, generator=source).to(torch.bfloat16).to(device)
    number = torch.arange(rows, device=device)
    keys = kernels.sampling_keys(number, number, number)
    heat = torch.ones(rows, dtype=torch.float64, device=device)
    most = rows * 3 // 4
    one = slice(most - 3, most - 2)
    assert torch.equal(kernels.rms_norm(x[one], weight, 1e-5), kernels.rms_norm(x, weight, 1e-5)[one])
    assert torch.equal(kernels.swiglu(x[one]), kernels.swiglu(x)[one])
    alone = kernels.sample_rows(x[one], heat[one], None, heat[one] * 0.9, keys[one])
    together = kernels.sample_rows(x[:most], heat[:most], None, heat[:most] * 0.9, keys[:most])
    assert alone[0] == together[0][one]
