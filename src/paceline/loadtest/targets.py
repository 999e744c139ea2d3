"""Which target the settings name."""

from __future__ import annotations

from paceline.loadtest.config import BenchConfig
from paceline.loadtest.grpc_target import GrpcTarget
from paceline.loadtest.openai_target import OpenAiTarget
from paceline.loadtest.target import Target


def make_target(config: BenchConfig, salt: str) -> Target:
    """Raises StartupError where the package that it needs is missing."""
    return GrpcTarget(config, salt) if config.openai is None else OpenAiTarget(config, salt)
