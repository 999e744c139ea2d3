"""From logits to tokens, without state: a draw is keyed by (seed, choice, absolute position, token id) alone.

So, given equal logits, the token is equal: in any batch, on either tier, after a replay. `paceline.kernels.sample` has
the mathematics; here logits are shaped as requests ask, rows are sorted into greedy and drawn ones, and unusable logits
are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import kernels
from paceline.engine.logits import Shaping, shape
from paceline.engine.logprobs import token_logprobs
from paceline.engine.narrow_draw import WIDTHS, narrow_draw
from paceline.engine.request import Chunk, Sampled
from paceline.types import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawPoint:
    """One row's parameters and place."""

    sampling: SamplingParams
    position: int  # of the token to sample: the tokens before it
    choice: int = 0  # which of a request's parallel samples
    shaping: Shaping | None = None  # caught up with the tokens before it


def draw_points(chunk: Chunk) -> list[DrawPoint]:
    """Where a chunk that samples does: a point for each choice that its request fans out to."""
    request = chunk.request
    if request.shaping is not None:
        request.shaping.catch_up(request.tokens)
    choices = range(request.choice, request.choice + request.fanout)
    return [DrawPoint(request.sampling, chunk.end, choice, request.shaping) for choice in choices]


def sample(logits: Tensor, points: Sequence[DrawPoint]) -> Sampled:
    """One token for each row of `logits` [rows, vocab], float32.

    Rows with NaN or infinite logits are reported as bad, and so are those whose every token is excluded. Greedy rows
    take the most likely token, of equals the one with the lowest id.
    """
    if not points:
        return Sampled([])
    bad = _rows(~_finite(logits))
    shaped = shape(logits, [point.shaping for point in points])
    if shaped is not logits:
        bad |= _rows(shaped.amax(-1) == -torch.inf)
    token_ids = shaped.argmax(-1)
    drawn = [row for row, point in enumerate(points) if not point.sampling.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        chosen = shaped if len(drawn) == len(points) else shaped[rows]
        token_ids[rows] = _draw(chosen, [points[row] for row in drawn])
    chosen_ids = token_ids.tolist()
    asked = [point.sampling.logprobs for point in points]
    wanted = any(number is not None for number in asked)
    return Sampled(chosen_ids, bad, token_logprobs(logits, chosen_ids, asked) if wanted else ())


def _finite(logits: Tensor) -> Tensor:
    least, most = logits.aminmax(dim=-1)
    return least.isfinite() & most.isfinite()


def _rows(mask: Tensor) -> frozenset[int]:
    return frozenset(torch.nonzero(mask)[:, 0].tolist()) if bool(mask.any()) else frozenset()


def _draw(logits: Tensor, points: Sequence[DrawPoint]) -> Tensor:
    """[rows, vocab] -> [rows]."""

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    columns = (
        column([point.sampling.temperature for point in points], torch.float64),
        column([point.sampling.top_k for point in points], torch.int64),
        column([point.sampling.top_p for point in points], torch.float64),
        kernels.sampling_keys(
            column([signed(point.sampling.seed) for point in points], torch.int64),
            column([point.choice for point in points], torch.int64),
            column([point.position for point in points], torch.int64),
        ),
    )
    cut = [row for row, point in enumerate(points) if point.sampling.top_k > 0 or point.sampling.top_p < 1.0]
    if not cut or kernels.backend_for(logits) is kernels.Backend.TRITON:
        return kernels.sample(logits, *columns)
    token_ids = torch.full((len(points),), -1)
    left = torch.tensor(cut)
    for width in WIDTHS:
        found, certain = narrow_draw(logits[left], *(each[left] for each in columns), width=width)
        token_ids[left[certain]] = found[certain]
        left = left[~certain]
        if not len(left):
            break
    left = torch.nonzero(token_ids < 0)[:, 0]
    if len(left):
        token_ids[left] = kernels.sample(logits[left], *(each[left] for each in columns))
    return token_ids


def signed(seed: int) -> int:
    """A seed of 64 bits as the signed number of the same bits, as tensors hold it."""
    return seed - 2**64 if seed >= 2**63 else seed
