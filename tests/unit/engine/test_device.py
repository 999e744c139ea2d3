"""What is said where a GPU can't be had, and what weights take before they are loaded."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.dummy import SHAPES
from paceline.config import DecodeConfig, PrefillConfig
from paceline.engine.device import open_device
from paceline.engine.step_shape import StepShapes
from paceline.engine.weights import nbytes
from paceline.errors import ConfigError, StartupError

CPU_BUILD = torch.version.cuda is None


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(not CPU_BUILD, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_named() -> None:
    with pytest.raises(StartupError, match=rf"cuda:1.*{torch.__version__.replace('+', '.')}.*without CUDA"):
        open_device("cuda:1")


@pytest.mark.skipif(CPU_BUILD, reason="this torch has no CUDA")
def test_a_gpu_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(StartupError, match="cuda:99"):
        open_device("cuda:99")


def test_weights_are_counted_before_they_are_loaded() -> None:
    shape = SHAPES["llama-3.1-8b"]
    assert nbytes(shape, torch.bfloat16) == 2 * 8_030_261_248
    assert nbytes(shape, torch.float32) == 4 * 8_030_261_248


def test_the_gpus_index_is_short_for_its_device() -> None:
    assert DecodeConfig(cuda_index=3).compute_device == "cuda:3"
    assert DecodeConfig(device="cuda:1").compute_device == "cuda:1"
    with pytest.raises(ConfigError, match="device: cuda:1 and cuda_index: 2 contradict each other"):
        DecodeConfig(device="cuda:1", cuda_index=2)
    with pytest.raises(ConfigError, match="device: cpu and cuda_index: 0 contradict each other"):
        DecodeConfig(device="cpu", cuda_index=0)
    assert DecodeConfig().compute_device == "cpu"


def test_limits_follow_the_device_where_nobody_sets_them() -> None:
    assert [PrefillConfig().step_tokens, PrefillConfig().step_requests] == [512, 64]
    assert [PrefillConfig(cuda_index=0).step_tokens, PrefillConfig(cuda_index=0).step_requests] == [1024, 256]
    assert [DecodeConfig(cuda_index=0).step_tokens, DecodeConfig(cuda_index=0).step_requests] == [512, 256]
    assert PrefillConfig(cuda_index=0, max_batch_tokens=2048, max_running=8).step_tokens == 2048


def test_batch_invariance_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match="batch_invariant: it is for GPUs, and the device is cpu"):
        DecodeConfig(batch_invariant=True)


@pytest.mark.parametrize(("budget", "requests"), [(512, 256), (1024, 64), (16, 8), (40, 100), (2000, 1)])
def test_every_step_within_the_limits_has_a_shape_that_holds_it(budget: int, requests: int) -> None:
    shapes = StepShapes(budget, requests)
    for count in range(1, min(budget, requests) + 1):
        decode = shapes.of(count, count)
        assert decode.decodes
        assert decode in shapes.all
        assert count <= decode.requests < 2 * count + 8
        for tokens in {count + 1, (count + budget) // 2, budget} - {count}:
            if count < tokens <= budget:
                prompt = shapes.of(tokens, count)
                assert prompt in shapes.all
                assert prompt.tokens >= tokens
                assert prompt.requests >= count
                assert prompt.tokens <= max(16, 2 * tokens)
