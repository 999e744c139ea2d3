"""Model files, free of torch: where a model comes from, its shape, its tensors in host memory, its digest."""

from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.reader import digest, open_tensors, read_config
from paceline.checkpoint.source import Source, SourceKind, resolve
from paceline.checkpoint.tensors import HostTensor, TensorInfo, Tensors

__all__ = [
    "HostTensor",
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
