"""What a request asks of its logits before the draw: penalties, biases, exclusions and min-p.

They apply in this order: to the model's own logits the repetition penalty (of tokens in prompt and output), then the
presence and frequency penalties (of tokens in the output alone), then `logit_bias`, then exclusions (biases of BANNED,
and before `min_tokens` whatever would end the answer), and last min-p, at the request's temperature. What is excluded
is minus infinity from there on, so that top-k and top-p count what is left, and no draw can take it.

Per step the work is proportional to the tokens that requests have, not to the vocabulary, but for min-p.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.types import BANNED, SamplingParams

Ids = NDArray[np.int64]


class TokenCounts:
    """A request's distinct tokens, and how often each is in its output. Grows by `add`; nothing is counted again."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """`prompt` tokens are known, with a count of 0."""
        known = np.unique(np.asarray(prompt, dtype=np.int64))
        self._ids: Ids = np.empty(2 * len(known) + 64, dtype=np.int64)
        self._ids[: len(known)] = known
        self._counts: Ids = np.zeros_like(self._ids)
        self._place = {token_id: place for place, token_id in enumerate(known.tolist())}

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> Ids:
        """[tokens], each once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Ids:
        """[tokens], times in the output."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1


class Shaping:
    """One request's wishes in the form in which they are applied, and what its output adds to them."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]) -> None:
        self.sampling = sampling
        self.counts: TokenCounts | None = None
        if sampling.repetition_penalty != 1.0:
            self.counts = TokenCounts(prompt)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = TokenCounts()
        added = [(token_id, bias) for token_id, bias in sampling.logit_bias if bias > BANNED]
        self.bias_ids: Ids = np.array([token_id for token_id, _ in added], dtype=np.int64)
        self.biases = np.array([bias for _, bias in added], dtype=np.float32)
        banned = [token_id for token_id, bias in sampling.logit_bias if bias <= BANNED]
        ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._banned: Ids = np.array(banned, dtype=np.int64)
        self._banned_at_first: Ids = np.array(sorted({*banned, *ending}), dtype=np.int64)
        self._num_prompt = len(prompt)
        self._num_output = 0

    @classmethod
    def of(cls, sampling: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]) -> Shaping | None:
        """The request's, or None where its logits stay as they are."""
        neutral = (
            sampling.repetition_penalty == 1.0
            and not sampling.presence_penalty
            and not sampling.frequency_penalty
            and not sampling.logit_bias
            and not sampling.min_tokens
            and not sampling.min_p
        )
        return None if neutral else cls(sampling, prompt, eos_token_ids)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Takes in what was added to the request's `tokens`, prompt and output, since the last call."""
        if self.counts is not None:
            for token_id in tokens[self._num_prompt + self._num_output :]:
                self.counts.add(token_id)
        self._num_output = len(tokens) - self._num_prompt

    @property
    def excluded(self) -> Ids:
        """Ids that the next token is not to be."""
        return self._banned_at_first if self._num_output < self.sampling.min_tokens else self._banned


def shape(logits: Tensor, shapings: Sequence[Shaping | None]) -> Tensor:
    """`logits` [rows, vocab] as each row's shaping wants them; the very same tensor where no row has one."""
    rows = [(row, shaping) for row, shaping in enumerate(shapings) if shaping is not None]
    if not rows:
        return logits
    shaped = logits.clone(memory_format=torch.contiguous_format)
    _penalise(shaped, [(row, each, each.counts) for row, each in rows if each.counts is not None])
    biased = [(row, each) for row, each in rows if len(each.bias_ids)]
    if biased:
        places = _places(shaped, [row for row, _ in biased], [each.bias_ids for _, each in biased])
        shaped.view(-1)[places] += _tensor(np.concatenate([each.biases for _, each in biased]), shaped)
    excluding = [(row, excluded) for row, each in rows if len(excluded := each.excluded)]
    if excluding:
        places = _places(shaped, [row for row, _ in excluding], [excluded for _, excluded in excluding])
        shaped.view(-1)[places] = -torch.inf
    _cut_min_p(shaped, [(row, each.sampling) for row, each in rows if each.sampling.min_p and not each.sampling.greedy])
    return shaped


def _penalise(logits: Tensor, rows: list[tuple[int, Shaping, TokenCounts]]) -> None:
    if not rows:
        return
    lengths = [len(counts) for _, _, counts in rows]

    def spread(values: list[float]) -> Tensor:
        return _tensor(np.repeat(np.array(values, dtype=np.float32), lengths), logits)

    places = _places(logits, [row for row, _, _ in rows], [counts.ids for _, _, counts in rows])
    times = _tensor(np.concatenate([counts.counts for _, _, counts in rows]), logits)
    repetition = spread([each.sampling.repetition_penalty for _, each, _ in rows])
    values = logits.view(-1)[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([each.sampling.presence_penalty for _, each, _ in rows]) * (times > 0)
    values -= spread([each.sampling.frequency_penalty for _, each, _ in rows]) * times
    logits.view(-1)[places] = values


def _cut_min_p(logits: Tensor, rows: list[tuple[int, SamplingParams]]) -> None:
    """p < min_p * (greatest p) is, of logits, x < (greatest x) + temperature * log(min_p)."""
    if not rows:
        return
    index = torch.tensor([row for row, _ in rows], device=logits.device)
    chosen = logits[index]
    below = _tensor(np.array([each.temperature * np.log(each.min_p) for _, each in rows]), logits)
    least = chosen.amax(-1, keepdim=True).double() + below[:, None]
    logits[index] = chosen.masked_fill_(chosen < least, -torch.inf)


def _places(logits: Tensor, rows: list[int], ids: list[Ids]) -> Tensor:
    """Each row's `ids` as indices into the flat logits."""
    starts = np.repeat(np.array(rows, dtype=np.int64) * logits.shape[1], [len(each) for each in ids])
    return _tensor(np.concatenate(ids) + starts, logits)


def _tensor(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
