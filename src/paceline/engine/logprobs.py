"""Log-probabilities of tokens under the model's own logits: before penalties, biases and temperature, as vLLM and the
OpenAI API report them, so that they compare between requests whatever these ask of the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.types import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Sequence[int], asked: Sequence[int | None]) -> list[TokenLogprob | None]:
    """Of each row of `logits` [rows, vocab], float32, the log-probability of `token_ids[row]`, and of the `asked[row]`
    most likely tokens; None where `asked` is. Only the rows that ask cost anything.
    """
    found: list[TokenLogprob | None] = [None] * len(asked)
    rows = [row for row, number in enumerate(asked) if number is not None]
    if not rows:
        return found
    chosen = logits if len(rows) == len(asked) else logits[torch.tensor(rows, device=logits.device)]
    logprobs = chosen.log_softmax(-1)
    ids = torch.tensor([[token_ids[row]] for row in rows], device=logits.device)
    of_token = logprobs.gather(1, ids)[:, 0].tolist()
    most = max(number for number in asked if number is not None)
    best, best_ids = logprobs.topk(min(most, logits.shape[1]))
    for row, logprob, values, top_ids in zip(rows, of_token, best.tolist(), best_ids.tolist(), strict=True):
        top = tuple(zip(top_ids, values, strict=True))[: asked[row]]
        found[row] = TokenLogprob(token_ids[row], logprob, top)
    return found
