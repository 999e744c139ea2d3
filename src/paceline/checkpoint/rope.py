"""Scaled rotary embeddings as what they come to: a divisor for each frequency."""

from __future__ import annotations

import math

from paceline.checkpoint.fields import Fields
from paceline.errors import CheckpointError, quote


def rope_factors(rope: Fields, *, head_dim: int, theta: float) -> tuple[float, ...]:
    """The divisors that Hugging Face's settings `rope` of one rotary embedding describe; empty where none is scaled.

    Raises `CheckpointError` for a kind of scaling that is not served.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    if kind == "linear":
        return linear_factors(rope.number("factor"), head_dim=head_dim)
    if kind == "llama3":
        return _llama3_factors(rope, head_dim=head_dim, theta=theta)
    raise CheckpointError(
        f"{rope.origin}: rotary embeddings scaled by {quote(kind)} are not supported, only default, linear and llama3"
    )


def linear_factors(factor: float, *, head_dim: int) -> tuple[float, ...]:
    """All positions closer together."""
    return () if factor == 1.0 else (factor,) * (head_dim // 2)


def _llama3_factors(rope: Fields, *, head_dim: int, theta: float) -> tuple[float, ...]:
    """Llama 3's: long waves are stretched by `factor`, short ones kept, those between blend from one to the other."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings")
    if not (factor > 0 and 0 < low < high and original > 0):
        raise CheckpointError(
            f"{rope.origin}: factor {factor}, low_freq_factor {low}, high_freq_factor {high} and "
            f"original_max_position_embeddings {original} make no scaling"
        )
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        kept = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(factors)
