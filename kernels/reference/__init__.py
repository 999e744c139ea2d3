"""Every kernel's twin in plain torch: what a kernel must compute, and what runs where there is no GPU.

Shapes: `tokens` are the rows of a step, all requests flattened one after the other. The KV pool of a group is one
tensor `[num_blocks, kv_heads, layers, 2, block_tokens, head_dim]`, in which a block is one contiguous piece; keys are
at index 0 of the fourth dimension and values at 1. Seen as rows of `head_dim`, all of a layer's rows lie at a constant
distance from layer 0's, so that a step computes its row numbers once.
"""

from paceline.kernels.reference.activation import geglu, swiglu
from paceline.kernels.reference.attention import AttentionPlan, attention, plan_attention
from paceline.kernels.reference.cache import copy_blocks, rope_and_store, rope_tables, store_rows
from paceline.kernels.reference.linear import linear
from paceline.kernels.reference.norm import add_rms_norm, qk_norm, rms_norm
from paceline.kernels.reference.sampling import GOLDEN, exponential_noise, mix64, sample, sample_rows, sampling_keys
from paceline.kernels.reference.scatter import ScatterCut, scatter_blocks
from paceline.kernels.reference.step import expand_requests, expand_tokens

__all__ = [
    "GOLDEN",
    "AttentionPlan",
    "add_rms_norm",
    "attention",
    "copy_blocks",
    "expand_requests",
    "expand_tokens",
    "exponential_noise",
    "geglu",
    "linear",
    "mix64",
    "plan_attention",
    "qk_norm",
    "rms_norm",
    "rope_and_store",
    "rope_tables",
    "sample",
    "sample_rows",
    "sampling_keys",
    "ScatterCut",
    "scatter_blocks",
    "store_rows",
    "swiglu",
]
