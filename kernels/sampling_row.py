"""What the sampling kernels ask of a row."""

import triton
import triton.language as tl


@triton.jit
def is_limited(
    top_k: tl.tensor, top_p: tl.tensor, row: tl.tensor, vocab: tl.tensor, BY_COUNT: tl.constexpr, BY_MASS: tl.constexpr
) -> tl.tensor:
    """Whether top-k or top-p may exclude a token."""
    limited = vocab < 0
    if BY_COUNT:
        limit = tl.load(top_k + row)
        limited = limited | ((limit > 0) & (limit < vocab))
    if BY_MASS:
        limited = limited | (tl.load(top_p + row) < 1.0)
    return limited


@triton.jit
def peak_of_row(
    peaks: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PARTS_WIDE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(the greatest logit, whether the row is of no use: it has NaN or infinity, or excludes every token)."""
    part = tl.arange(0, PARTS_WIDE)
    peak = tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    nan = peak != peak
    most = tl.max(tl.where(nan, float("-inf"), peak), axis=0)
    spoilt = (tl.max(nan.to(tl.int32), axis=0) > 0) | (most == float("inf")) | (most == float("-inf"))
    return most, spoilt


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """A number of the same order as the float32 logit, int32; of both zeros the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key: tl.tensor) -> tl.tensor:
    """The logit of such a number."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x: tl.tensor, most: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """A token's weight beside the likeliest one's, float64."""
    return tl.exp((x.to(tl.float64) - most.to(tl.float64)) / heat)
