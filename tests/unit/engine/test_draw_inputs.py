"""What a step's sampling uploads, and that it draws the tokens that the sampler on a CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.block_pool import BlockPool
from paceline.engine.device_sampler import DeviceSampler
from paceline.engine.draw_inputs import pack, sampling_keys, split
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.sampler import DrawPoint, sample, signed
from paceline.engine.step_inputs import Staging
from paceline.kernels import reference
from paceline.types import RequestId, SamplingParams

WORD = st.integers(0, 2**64 - 1)
CPU = torch.device("cpu")
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=2**64 - 1),
    SamplingParams(temperature=1.3, top_k=5, seed=2**63),
    SamplingParams(temperature=1.0, top_p=0.5, seed=7),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=7),
]


def chunks(samplings: list[SamplingParams]) -> list[Chunk]:
    """Each at a position and a choice of its own."""
    pool, made = BlockPool(0), []
    for row, sampling in enumerate(samplings):
        tokens = [1] * (row + 3)
        request = EngineRequest(RequestId(str(row)), tokens, len(tokens), sampling, pool.lease(0), choice=row % 3)
        made.append(Chunk(request, start=row + 2, num_tokens=1))
    return made


@given(st.lists(st.tuples(WORD, st.integers(0, 127), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_keys_are_those_of_the_kernels(rows: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = zip(*rows, strict=True)
    found = sampling_keys(*(np.array(column, dtype=np.uint64) for column in (seeds, choices, positions)))
    columns = [list(map(signed, seeds)), list(choices), list(positions)]
    expected = reference.sampling_keys(*map(torch.tensor, columns))
    assert found.view(np.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [5, 8])
def test_columns_come_apart_as_they_were_packed_and_padding_is_greedy(rows: int) -> None:
    buffer = torch.full((4 * rows,), -1)
    pack(buffer.numpy(), rows, chunks(SAMPLINGS))
    temperature, top_k, top_p, _ = split(buffer, rows)
    padding = [0] * (rows - len(SAMPLINGS))
    assert temperature.tolist() == [each.temperature for each in SAMPLINGS] + padding
    assert top_k.tolist() == [each.top_k for each in SAMPLINGS] + padding
    assert top_p.tolist() == [each.top_p for each in SAMPLINGS] + padding


@pytest.mark.parametrize("rows", [5, 8])
def test_a_device_draws_the_tokens_that_the_sampler_does(rows: int) -> None:
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1)) * 2
    made = chunks(SAMPLINGS)
    staging = Staging(0, 4 * rows, rows, CPU)
    token_ids, logprobs = DeviceSampler(rows, CPU).draw(logits, made, staging)
    points = [DrawPoint(each.request.sampling, each.end, choice=each.request.choice) for each in made]
    expected = sample(logits[: len(made)], points).token_ids
    assert token_ids[: len(made)].tolist() == staging.results[: len(made)].tolist() == list(expected)
    assert logprobs is None
