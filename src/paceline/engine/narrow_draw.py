"""Draws on a CPU that look at a row's likeliest tokens alone: top-k and top-p seldom keep more.

It computes what the kernels' twin of `sample` does, to the last bit, from the same probabilities. A row that keeps more
than the last of WIDTHS tokens is left to the twin, so that a row's token hangs on that row alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.kernels.reference import exponential_noise

WIDTHS: Final = (256, 4096)
"""Tokens of a row that are looked at, then where these were too few."""


def narrow_draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, *, width: int
) -> tuple[Tensor, Tensor]:
    """As `kernels.sample`, for rows that each have a top-k or a top-p: (token ids, which of them are true) [rows].

    `width` most likely tokens of each are looked at.
    """
    vocab = logits.shape[1]
    width = min(width, vocab)
    best, token_ids = logits.topk(width)
    scaled = logits.double().sub_(best[:, :1]).div_(temperature[:, None])
    ranked = scaled.softmax(-1).gather(1, token_ids)
    mass = ranked.cumsum(-1)
    limited = (top_k > 0) & (top_k < vocab)
    last = (torch.where(limited, top_k, 1) - 1).clamp(max=width - 1)[:, None]
    wanted = top_p * torch.where(limited, mass.gather(1, last)[:, 0], 1.0)
    inside = (mass < wanted[:, None]).sum(-1)  # the rank at which top_p is reached
    least_k = torch.where(limited, ranked.gather(1, last)[:, 0], 0.0)
    least_p = torch.where(top_p < 1.0, ranked.gather(1, inside.clamp(max=width - 1)[:, None])[:, 0], 0.0)
    least = torch.maximum(least_k, least_p)
    # The cut is certain where a token below it was seen, and where what was looked at holds both limits.
    seen = (~limited | (top_k < width)) & (inside < width) & (ranked[:, -1] < least)
    race = exponential_noise(keys[:, None], token_ids) / ranked
    winner = race.masked_fill_(ranked < least[:, None], torch.inf).argmin(-1, keepdim=True)
    return token_ids.gather(1, winner)[:, 0], seen
