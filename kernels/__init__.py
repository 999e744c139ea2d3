"""The kernels, behind one set of names: Triton's form on a GPU, on a CPU that in C or the torch twin
(`paceline.kernels.dispatch`).

The twins, in `paceline.kernels.reference`, say what each computes and in which shapes.
"""

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels import reference
from paceline.kernels.dispatch import Backend, backend_for, dispatched, forced
from paceline.kernels.modes import batch_invariant, kernels_may_overlap, overlapping, set_batch_invariant
from paceline.kernels.native.attention import DecodePlan, decode_attention, plan_decode
from paceline.kernels.native.quantised import attach_quantised, nbytes_read, reads_quantised
from paceline.kernels.paged_plan import PagedPlan, plan_pages
from paceline.kernels.reference import ScatterCut, rope_tables, sampling_keys, store_rows

AttentionPlan = reference.AttentionPlan | PagedPlan | DecodePlan

rms_norm = dispatched(reference.rms_norm, "norm")
add_rms_norm = dispatched(reference.add_rms_norm, "norm")
qk_norm = dispatched(reference.qk_norm, "norm")
swiglu = dispatched(reference.swiglu, "activation")
geglu = dispatched(reference.geglu, "activation")
linear = dispatched(reference.linear, "skinny_linear")
rope_and_store = dispatched(reference.rope_and_store, "cache")
copy_blocks = dispatched(reference.copy_blocks, "cache")
expand_tokens = dispatched(reference.expand_tokens, "step")
expand_requests = dispatched(reference.expand_requests, "step")
scatter_blocks = dispatched(reference.scatter_blocks, "scatter")
sample = dispatched(reference.sample, "sampling")
sample_rows = dispatched(reference.sample_rows, "sampling")


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    pool: Tensor,
    window: int | None = None,
) -> AttentionPlan:
    """How to compute a step's attention, once for all layers that share a window.

    Request i has `starts[i]` tokens stored before the step, `lengths[i]` tokens in it, after those of request i - 1,
    and its blocks in `tables[i]`. A token sees itself and the tokens before it, at most `window` in all; blocks that
    lie before every window are never read, so their entries in the table may hold anything.
    """
    backend = backend_for(pool)
    if backend is Backend.TRITON:
        return plan_pages(starts, lengths, tables, pool, window)
    decode = plan_decode(starts, lengths, tables, pool, window) if backend is Backend.NATIVE else None
    return decode or reference.plan_attention(starts, lengths, tables, pool, window)


def attention(qkv: Tensor, pool: Tensor, layer: int, plan: AttentionPlan, scale: float | None = None) -> Tensor:
    """Each token's attention to its request's tokens up to itself, the step's own already stored in the pool.

    `qkv` [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]. `scale` multiplies the products of
    queries and keys; by default 1 / sqrt(head_dim).
    """
    if isinstance(plan, DecodePlan):
        return decode_attention(qkv, pool, layer, plan, scale)
    if not isinstance(plan, PagedPlan):
        return reference.attention(qkv, pool, layer, plan, scale)
    from paceline.kernels.paged_attention import attention as compiled  # Triton comes with it: never on a CPU.

    return compiled(qkv, pool, layer, plan, scale)


__all__ = [
    "AttentionPlan",
    "Backend",
    "DecodePlan",
    "PagedPlan",
    "ScatterCut",
    "add_rms_norm",
    "attach_quantised",
    "attention",
    "backend_for",
    "batch_invariant",
    "copy_blocks",
    "expand_requests",
    "expand_tokens",
    "forced",
    "geglu",
    "kernels_may_overlap",
    "linear",
    "nbytes_read",
    "overlapping",
    "plan_attention",
    "qk_norm",
    "reads_quantised",
    "rms_norm",
    "rope_and_store",
    "rope_tables",
    "sample",
    "sample_rows",
    "sampling_keys",
    "scatter_blocks",
    "set_batch_invariant",
    "store_rows",
    "swiglu",
]
