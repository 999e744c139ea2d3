"""Norms, activations, and what enters the pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from paceline import kernels
from paceline.testing.nearness import DTYPES, assert_near, cases

NORMS = {"dtype": DTYPES, "rows": (1, 3, 17), "width": (1, 64, 100, 576, 2048)}
QK = {"dtype": DTYPES, "group": (1, 2, 3, 5, 8), "kv_heads": (1, 2), "head_dim": (64, 80, 96, 128, 256)}


def _normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@cases(NORMS)
def test_rms_norm(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, rows, width = case.values()
    x, weight = _normal(device, dtype, rows, width), _normal(device, dtype, width, seed=1)
    before = x.clone()
    assert_near(kernels.rms_norm(x, weight, 1e-5), _normed(x, weight, 1e-5))
    assert torch.equal(x, before)


@cases(NORMS)
def test_rms_norm_with_residual(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, rows, width = case.values()
    x, weight = _normal(device, dtype, rows, width), _normal(device, dtype, width, seed=1)
    residual = _normal(device, dtype, rows, width, seed=2)
    kept = residual + x
    found = kernels.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(residual, kept)
    assert_near(found, _normed(kept, weight, 1e-2))


def test_norms_of_rows_that_lie_apart(backend: kernels.Backend, device: torch.device) -> None:
    whole = _normal(device, torch.float32, 4, 96)
    weight = _normal(device, torch.float32, 48, seed=1)
    assert_near(kernels.rms_norm(whole[:, :48], weight, 1e-5), _normed(whole[:, :48], weight, 1e-5))


@cases(QK)
def test_qk_norm_leaves_values(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, group, kv_heads, head_dim = case.values()
    heads = group * kv_heads
    qkv = _normal(device, dtype, 3, heads + 2 * kv_heads, head_dim)
    q_weight, k_weight = _normal(device, dtype, head_dim, seed=1), _normal(device, dtype, head_dim, seed=2)
    wanted = qkv.double()
    wanted[:, :heads] = _normed(qkv[:, :heads], q_weight, 1e-6)
    wanted[:, heads : heads + kv_heads] = _normed(qkv[:, heads : heads + kv_heads], k_weight, 1e-6)
    values = qkv[:, heads + kv_heads :].clone()
    kernels.qk_norm(qkv, kv_heads, q_weight, k_weight, 1e-6)
    assert_near(qkv, wanted)
    assert torch.equal(qkv[:, heads + kv_heads :], values)


@cases({"dtype": DTYPES, "rows": (1, 5), "width": (1, 80, 1024, 1500), "size": (1.0, 40.0)})
def test_gated_activations(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    """Also far from zero, where an exponential overflows."""
    dtype, rows, width, size = case.values()
    gate_up = _normal(device, dtype, rows, 2 * width) * size
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.swiglu(gate_up), F.silu(gate) * up)
    assert_near(kernels.geglu(gate_up), F.gelu(gate, approximate="tanh") * up)


@cases(QK)
def test_rotary_and_store(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, group, kv_heads, head_dim = case.values()
    heads, layer = group * kv_heads, 1
    positions = torch.tensor([0, 1, 900, 17], device=device)
    slots = torch.tensor([16 * 3, 16 * 3 + 1, 16 * 5 + 4, 15], device=device)
    qkv = _normal(device, dtype, 4, heads + 2 * kv_heads, head_dim)
    pool = _normal(device, dtype, 6, kv_heads, 3, 2, 16, head_dim, seed=1)
    cos, sin = (table[positions] for table in kernels.rope_tables(head_dim, 1000, 1e4, device))

    first, second = qkv.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    values = qkv[:, heads + kv_heads :].clone()
    untouched = pool.clone()
    kernels.rope_and_store(qkv, cos, sin, kernels.store_rows(slots, pool), pool, layer)

    assert_near(qkv[:, : heads + kv_heads], turned[:, : heads + kv_heads])
    for row, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, 16)
        assert torch.equal(pool[block, :, layer, 0, place], qkv[row, heads : heads + kv_heads])
        assert torch.equal(pool[block, :, layer, 1, place], values[row])
        untouched[block, :, layer, :, place] = pool[block, :, layer, :, place]
    assert torch.equal(pool, untouched)


def test_a_row_that_is_padding_is_not_stored(triton_backend: None, device: torch.device) -> None:
    pool = _normal(device, torch.float32, 3, 2, 2, 2, 16, 64)
    before = pool.clone()
    qkv = _normal(device, torch.float32, 2, 8, 64, seed=1)
    cos, sin = (table[:2] for table in kernels.rope_tables(64, 2, 1e4, device))
    rows = torch.full((2, 1), -1, device=device)
    kernels.rope_and_store(qkv, cos, sin, rows, pool, 1)
    assert torch.equal(pool, before)


@cases({"dtype": DTYPES, "kv_heads": (1, 3), "layers": (1, 5), "head_dim": (64, 80, 256)})
def test_blocks_are_copied_whole(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, kv_heads, layers, head_dim = case.values()
    pool = _normal(device, dtype, 7, kv_heads, layers, 2, 16, head_dim)
    pool[1, 0, 0, 0, 0, 0] = torch.nan
    wanted = pool.clone()
    wanted[[0, 5, 6]] = wanted[[1, 1, 3]]
    kernels.copy_blocks(pool, torch.tensor([1, -1, 1, 3], device=device), torch.tensor([0, -1, 5, 6], device=device))
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))


def test_nothing_to_do_is_no_error(backend: kernels.Backend, device: torch.device) -> None:
    empty = torch.zeros(0, 64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert kernels.rms_norm(empty, torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert kernels.swiglu(empty).shape == (0, 32)
    kernels.copy_blocks(torch.zeros(2, 1, 1, 2, 16, 64, device=device), none, none)
