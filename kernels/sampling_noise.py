"""The race's noise on a GPU: the twin's to the bit, and a float32 estimate that costs a third of it."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-7046029254386353131)  # the twin's
_UNITS = tl.constexpr(2**52)  # of which u is a number and a half
_SMALL = tl.constexpr(2**48)  # u < 1/16


@triton.jit
def _mix64(z: tl.tensor) -> tl.tensor:
    """The twin's `mix64`, bit for bit; shifts of signed numbers copy the sign, hence the masks."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def random_bits(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """64 random bits of a row's generator for a token, int64."""
    return _mix64(key + (token.to(tl.int64) + 1) * GOLDEN)


@triton.jit
def exponential_noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The twin's `exponential_noise`: the same u, of which 1 - u is exact too, so that no log1p is needed."""
    bits = (random_bits(key, token) >> 12) & 0xFFFFFFFFFFFFF
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(1.0 - u)


@triton.jit
def log2_noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """log2 of `exponential_noise` in float32, within 2^-16.

    The GPU's logarithm is off by up to 2^-22 near 1, so a small u's -log(1 - u) is a series instead: its sixth power's
    term, the first left out, is below 2^-26 of the sum.
    """
    bits = (random_bits(key, token) >> 12) & 0xFFFFFFFFFFFFF
    small = bits < _SMALL
    # Of u, or of 1 - u: whichever is rounded to float32 without losing what matters.
    part = tl.where(small, bits, _UNITS - bits).to(tl.float32) + tl.where(small, 0.5, -0.5)
    part = part * 2.220446049250313e-16
    series = part * (1.0 + part * (0.5 + part * (0.33333333 + part * (0.25 + part * (0.2 + part * 0.16666667)))))
    return tl.log2(tl.where(small, series, -0.6931471805599453 * tl.log2(part)))
