"""Shapes without weights, for benchmarks and tests: `dummy:` sources get seeded random values at load."""

from __future__ import annotations

from typing import Final

from paceline.checkpoint.model_config import ModelConfig

SHAPES: Final = {
    "tiny": ModelConfig(
        architecture="llama",
        name="dummy:tiny",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_tokens=2_048,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tied_embeddings=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama",
        name="dummy:smollm2-135m",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_tokens=8_192,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        tied_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    # Without the scaling of its rotary embedding: only the cost of its shape matters here.
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        name="dummy:llama-3.1-8b",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_tokens=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        tied_embeddings=False,
        eos_token_ids=(128_001, 128_008, 128_009),
        bos_token_id=128_000,
    ),
}
