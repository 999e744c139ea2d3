"""Model files, free of torch: where a model comes from, its shape, its tensors in host memory, its digest."""

from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.reader import digest, open_tensors, read_config
from paceline.checkpoint.source import Source, SourceKind, resolve
from paceline.checkpoint.tensors import HostTensor, QuantisedRows, TensorInfo, Tensors

__all__ = [
    "HostTensor",
    "QuantisedRows",
    "ModelConfig",
    "Source",
    "SourceKind",
    "TensorInfo",
    "Tensors",
    "digest",
    "open_tensors",
    "read_config",
    "resolve",
]
