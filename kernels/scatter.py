"""Copies blocks between two pools that lie at addresses of their own: ours, and a peer's that is mapped here."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.launch import launch
from paceline.kernels.reference.scatter import VECTOR_BYTES, ScatterCut, check_alignment

WORD_BYTES = 4
_ROUNDS = 4
"""Fewest pieces of each program: with bigger ones some would still copy when the others are done."""


@triton.jit(do_not_specialize=["source", "target", "num_pairs", "vectors", "piece"])
def _scatter_blocks(
    pairs: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    num_pairs: tl.tensor,
    vectors: tl.tensor,
    piece: tl.tensor,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    STORE: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    words = vectors * VECTOR
    chunks = tl.cdiv(words, CHUNK)
    pieces = tl.cdiv(chunks, piece)
    block_bytes = words.to(tl.int64) * 4
    for item in range(tl.program_id(0), num_pairs * pieces, tl.num_programs(0)):
        pair = item // pieces
        first = (item - pair * pieces) * piece
        from_block = tl.load(pairs + 2 * pair).to(tl.int64)
        to_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
        from_start = (source + from_block * block_bytes).to(tl.pointer_type(tl.int32))
        to_start = (target + to_block * block_bytes).to(tl.pointer_type(tl.int32))
        for chunk in tl.range(first, tl.minimum(first + piece, chunks), num_stages=STAGES):
            word = chunk * CHUNK + tl.arange(0, CHUNK)
            real = word < words
            # Addresses are plain numbers to the compiler: it is told what `VECTOR_BYTES` promises.
            from_ = tl.max_contiguous(tl.multiple_of(from_start + word, 16), CHUNK)
            to = tl.max_contiguous(tl.multiple_of(to_start + word, 16), CHUNK)
            loaded = tl.load(from_, mask=real, eviction_policy=EVICT)
            tl.store(to, loaded, mask=real, cache_modifier=STORE)


def scatter_blocks(pairs: Tensor, source: int, target: int, block_bytes: int, cut: ScatterCut | None = None) -> None:
    """As its twin, on the current stream."""
    check_alignment(source, target, block_bytes)
    cut = cut or ScatterCut()
    launch(
        _scatter_blocks,
        (cut.programs,),
        pairs,
        source,
        target,
        pairs.shape[0],
        block_bytes // VECTOR_BYTES,
        chunks_of_piece(pairs.shape[0], block_bytes, cut),
        CHUNK=cut.chunk_bytes // WORD_BYTES,
        VECTOR=VECTOR_BYTES // WORD_BYTES,
        STAGES=cut.stages,
        STORE=".cs" if cut.streaming else "",
        EVICT="evict_first" if cut.streaming else "",
        num_warps=cut.warps,
    )


def chunks_of_piece(num_pairs: int, block_bytes: int, cut: ScatterCut) -> int:
    """Chunks that a program copies one after the other: those of a piece, but fewer where there is little to copy."""
    chunks = num_pairs * -(-block_bytes // cut.chunk_bytes)
    return max(1, min(cut.piece_bytes // cut.chunk_bytes, chunks // (_ROUNDS * cut.programs)))
