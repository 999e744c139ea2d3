"""Lays open what the sampling kernel draws, for its tests."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch
from paceline.kernels.sampling_noise import exponential_noise, random_bits


@triton.jit
def _noise(keys: tl.tensor, tokens: tl.tensor, bits: tl.tensor, noise: tl.tensor, COUNT: tl.constexpr) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, COUNT)
    key, token = tl.load(keys + row), tl.load(tokens + lane)
    tl.store(bits + row * COUNT + lane, random_bits(key, token))
    tl.store(noise + row * COUNT + lane, exponential_noise(key, token))


def noise_of(keys: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The random bits, int64, and the exponential draws, float64, of `keys` [rows] and `tokens` [a power of two]."""
    shape = (keys.shape[0], tokens.shape[0])
    bits = torch.empty(shape, dtype=torch.int64, device=keys.device)
    noise = torch.empty(shape, dtype=torch.float64, device=keys.device)
    launch(_noise, (shape[0],), keys, tokens, bits, noise, COUNT=shape[1])
    return bits, noise
