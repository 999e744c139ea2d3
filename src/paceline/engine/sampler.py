"""From logits to tokens, without state: a draw is keyed by (seed, choice, absolute position, token id) alone.

So, given equal logits, the token is equal: in any batch, on either tier, after a replay. `paceline.kernels.sample` has
the mathematics; here rows are sorted into greedy and drawn ones, and unusable logits are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import kernels
from paceline.engine.request import EngineRequest, Sampled
from paceline.types import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawPoint:
    """One row's parameters and place."""

    sampling: SamplingParams
    position: int  # of the token to sample: the tokens before it
    choice: int = 0  # which of a request's parallel samples

    @classmethod
    def of(cls, request: EngineRequest) -> DrawPoint:
        """Where the request samples next."""
        return cls(request.sampling, request.target)


def sample(logits: Tensor, points: Sequence[DrawPoint]) -> Sampled:
    """One token for each row of `logits` [rows, vocab]; rows with NaN or infinite logits are reported as bad.

    Greedy rows take the most likely token, of equals the one with the lowest id.
    """
    if not points:
        return Sampled([])
    token_ids = logits.argmax(-1)
    drawn = [row for row, point in enumerate(points) if not point.sampling.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        chosen = logits if len(drawn) == len(points) else logits[rows]
        token_ids[rows] = _draw(chosen, [points[row] for row in drawn])
    return Sampled(token_ids.tolist(), _bad_rows(logits))


def _bad_rows(logits: Tensor) -> frozenset[int]:
    least, most = logits.aminmax(dim=-1)
    finite = least.isfinite() & most.isfinite()
    return frozenset() if bool(finite.all()) else frozenset(torch.nonzero(~finite)[:, 0].tolist())


def _draw(logits: Tensor, points: Sequence[DrawPoint]) -> Tensor:
    """[rows, vocab] -> [rows]."""

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return kernels.sample(
        logits,
        temperature=column([point.sampling.temperature for point in points], torch.float64),
        top_k=column([point.sampling.top_k for point in points], torch.int64),
        top_p=column([point.sampling.top_p for point in points], torch.float64),
        keys=kernels.sampling_keys(
            column([_signed(point.sampling.seed) for point in points], torch.int64),
            column([point.choice for point in points], torch.int64),
            column([point.position for point in points], torch.int64),
        ),
    )


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - 2**64 if seed >= 2**63 else seed
