"""Sampling in plain torch: noise keyed by position, and the race that it decides."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: 2^64 / the golden ratio, made odd
NUCLEUS_WIDTH = 1024
"""Most likely tokens looked at first for a top-p cut; a flatter distribution is sorted whole."""


def mix64(z: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea, Flood, 2014; Stafford's variant 13), elementwise, int64, in place.

    With a state that grows by GOLDEN for each draw this is the whole generator, and any draw can be had without the
    others.
    """
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def sampling_keys(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """One generator a row from (seed, choice, absolute position), all int64 [rows]."""
    of_choice = mix64(mix64(seeds + GOLDEN) + choices * GOLDEN)
    return mix64(of_choice + positions * GOLDEN)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard exponential draws, float64, positive and finite: `keys` [rows, 1], `token_ids` [rows or 1, n] -> [rows,
    n].

    52 bits and a half: u lies in [2^-53, 1 - 2^-53], exactly representable, so E = -log1p(-u) is within [1.1e-16,
    36.8].
    """
    bits = (mix64(keys + (token_ids + 1) * GOLDEN) >> 12).bitwise_and_((1 << 52) - 1)
    u = bits.double().add_(0.5).mul_(2.0**-52)
    return u.neg_().log1p_().neg_()


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """One token a row: the winner of a race in which token t takes E[t] / p[t], among those that top_k and top_p keep.

    `logits` [rows, vocab]; `temperature` and `top_p` float64, `top_k` (0: no limit) and `keys` int64, all [rows].
    A row of temperature 0 takes its most likely token, of equals the one with the lowest id. A row's result depends on
    that row alone, whatever it is batched with.
    """
    greedy = temperature <= 0
    if bool(greedy.any()):
        drawn = sample(logits, temperature.masked_fill(greedy, 1.0), top_k, top_p, keys)
        return torch.where(greedy, logits.argmax(-1), drawn)
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(temperature[:, None])
    probabilities = scaled.softmax(-1)
    keys = keys[:, None]
    if not bool(((top_k > 0) | (top_p < 1.0)).any()):
        token_ids = torch.arange(logits.shape[1], device=logits.device)[None]
        return (exponential_noise(keys, token_ids) / probabilities).argmin(-1)
    kept = probabilities >= _least_kept(probabilities, top_k, top_p)[:, None]
    most = max(1, int(kept.sum(-1).amax()))
    token_ids = torch.where(kept, probabilities, -1.0).topk(most).indices.sort(-1).values
    race = (exponential_noise(keys, token_ids) / probabilities.gather(1, token_ids)).masked_fill_(
        ~kept.gather(1, token_ids), torch.inf
    )
    return token_ids.gather(1, race.argmin(-1, keepdim=True))[:, 0]


def sample_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """`sample` for rows that may be unusable: (token ids int64, bad bool), both [rows].

    A row is bad, and its token 0, if it has NaN or positive infinity, or no logit above negative infinity: that one
    excludes a token. `logits` [rows, vocab] of any float type, a row's side by side; `temperature` and `top_p` float64
    or float32, `top_k` int64 or int32, `keys` int64. None for `top_k` or `top_p` says that no row has such a limit,
    and saves looking for it. Nothing waits for the device, and no size depends on data: a graph may capture it.
    """
    most = logits.amax(-1)
    bad = ~most.isfinite()
    usable = logits.float().masked_fill(bad[:, None], 0.0)
    heat = temperature.double().masked_fill(bad, 0.0)
    limit = torch.zeros_like(keys) if top_k is None else top_k.long()
    share = torch.ones_like(heat) if top_p is None else top_p.double()
    return sample(usable, heat, limit, share, keys), bad


def _least_kept(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Each row's smallest probability that stays, [rows].

    Top-k first; then the fewest most likely tokens that make up top_p of what is left. Tokens as likely as the last
    one in stay in too, so that the cut is a value, and does not hang on how a sort orders equals.
    """
    vocab = probabilities.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    nucleus = top_p < 1.0
    limited = limit < vocab
    width = min(vocab, max(NUCLEUS_WIDTH, int(torch.where(limited, limit, 1).amax())))
    while True:
        ranked = probabilities.topk(width).values
        mass = ranked.cumsum(-1)
        last = (limit - 1).clamp(max=width - 1)[:, None]
        wanted = top_p * torch.where(limited, mass.gather(1, last)[:, 0], 1.0)
        inside = (mass < wanted[:, None]).sum(-1)  # the rank at which top_p is reached
        if width == vocab or not bool((nucleus & ~limited & (inside == width)).any()):
            break
        width = vocab
    least_k = torch.where(limited, ranked.gather(1, last)[:, 0], 0.0)
    least_p = torch.where(nucleus, ranked.gather(1, inside.clamp(max=width - 1)[:, None])[:, 0], 0.0)
    return torch.maximum(least_k, least_p)
