"""The kernels, behind one set of names. Today each is its twin in plain torch, `paceline.kernels.reference`."""

from paceline.kernels.reference import (
    AttentionPlan,
    add_rms_norm,
    attention,
    plan_attention,
    rms_norm,
    rope_and_store,
    rope_tables,
    sample,
    sampling_keys,
    store_rows,
    swiglu,
)

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "attention",
    "plan_attention",
    "rms_norm",
    "rope_and_store",
    "rope_tables",
    "sample",
    "sampling_keys",
    "store_rows",
    "swiglu",
]
