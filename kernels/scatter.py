"""Copies blocks between two pools that lie at addresses of their own: ours, and a peer's that is mapped here."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch
from paceline.kernels.reference.scatter import VECTOR_BYTES, check_alignment

WORD_BYTES = 4
CHUNK_BYTES = 32768
"""What a program has in flight at once. A link of 400 GB/s with 1 us from load to store needs 12 KiB of each of 32."""
WARPS = 16


@triton.jit(do_not_specialize=["source", "target", "num_pairs", "vectors"])
def _scatter_blocks(
    pairs: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    num_pairs: tl.tensor,
    vectors: tl.tensor,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    words = vectors * VECTOR
    chunks = tl.cdiv(words, CHUNK)
    block_bytes = words.to(tl.int64) * 4
    for item in range(tl.program_id(0), num_pairs * chunks, tl.num_programs(0)):
        pair = item // chunks
        word = (item - pair * chunks) * CHUNK + tl.arange(0, CHUNK)
        real = word < words
        from_block = tl.load(pairs + 2 * pair).to(tl.int64)
        to_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
        from_ = (source + from_block * block_bytes).to(tl.pointer_type(tl.int32)) + word
        to = (target + to_block * block_bytes).to(tl.pointer_type(tl.int32)) + word
        # Addresses are plain numbers to the compiler: it is told what `VECTOR_BYTES` promises.
        from_ = tl.max_contiguous(tl.multiple_of(from_, 16), CHUNK)
        to = tl.max_contiguous(tl.multiple_of(to, 16), CHUNK)
        tl.store(to, tl.load(from_, mask=real), mask=real)


def scatter_blocks(pairs: Tensor, source: int, target: int, block_bytes: int, programs: int = 32) -> None:
    """As its twin, on the current stream, with `programs` programs: each keeps one multiprocessor half busy."""
    check_alignment(source, target, block_bytes)
    launch(
        _scatter_blocks,
        (programs,),
        pairs,
        source,
        target,
        pairs.shape[0],
        block_bytes // VECTOR_BYTES,
        CHUNK=CHUNK_BYTES // WORD_BYTES,
        VECTOR=VECTOR_BYTES // WORD_BYTES,
        num_warps=WARPS,
    )
