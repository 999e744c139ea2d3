"""The architectures, a file each; one that differs from another by an option or two is that other with the option."""

from __future__ import annotations

from paceline.checkpoint.model_config import ModelConfig
from paceline.engine.models.gemma3 import Gemma3
from paceline.engine.models.llama import Llama
from paceline.engine.models.model import Model
from paceline.engine.weights import Weights


def create(config: ModelConfig, weights: Weights) -> Model:
    """The model of this shape over these weights."""
    return Gemma3(config, weights) if config.architecture == "gemma3" else Llama(config, weights)


__all__ = ["Gemma3", "Llama", "Model", "create"]
