"""RMS norms in plain torch."""

from __future__ import annotations

from torch import Tensor, rsqrt


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean square in float32. `x` [..., hidden]."""
    wide = x.float()
    scale = rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place and returns the sum's `rms_norm`. Both [tokens, hidden]."""
    return rms_norm(residual.add_(x), weight, eps)


def qk_norm(qkv: Tensor, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Each query's and each key's `rms_norm` over its head, in place; values stay.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim]; weights [head_dim].
    """
    heads = qkv.shape[1] - 2 * kv_heads
    for part, weight in ((qkv[:, :heads], q_weight), (qkv[:, heads : heads + kv_heads], k_weight)):
        part.copy_(rms_norm(part, weight, eps))
