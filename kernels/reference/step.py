"""What a step reads, laid out on the device from a few numbers a request, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_tokens(
    owners: Tensor,
    given: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    slots: Tensor,
    tables: Tensor,
    latest: Tensor,
    pool: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
) -> None:
    """Fills `token_ids`, `positions` [tokens] and `rows` [tokens, 1], all int64, for the step's tokens.

    int32, on the device: `owners` [tokens], the request that each token is of, -1 for padding; `given` [tokens], ids as
    far as the host knows them, else -1: the one in `latest` [slots], int64. `query_starts` [requests + 1]: each
    request's first token. `starts`, `slots` [requests]: tokens that are stored before the step, and which row of
    `tables` [slots, blocks] is the request's. `rows` is where layer 0 of `pool` keeps the token's first key, as
    `store_rows` counts; -1 for padding, which has token 0 at position 0.
    """
    _, kv_heads, layers, _, block_tokens, _ = pool.shape
    real = owners >= 0
    owner = owners.clamp(min=0).long()
    slot = slots[owner].long()
    token = torch.arange(len(owners), device=owners.device)
    position = torch.where(real, starts[owner] + token - query_starts[owner], 0).long()
    known = torch.where(given >= 0, given.long(), latest[slot])
    token_ids.copy_(torch.where(real, known, 0))
    positions.copy_(position)
    block = tables[slot, position // block_tokens].long()
    row = block * (kv_heads * layers * 2 * block_tokens) + position % block_tokens
    rows[:, 0].copy_(torch.where(real, row, -1))


def expand_requests(
    query_starts: Tensor,
    starts: Tensor,
    slots: Tensor,
    tables: Tensor,
    block_tokens: int,
    contexts: Tensor,
    sample_rows: Tensor,
    step_tables: Tensor,
) -> None:
    """Fills `contexts` int32 [requests], tokens stored after the step, `sample_rows` int64 [requests], each one's last
    token, and of `step_tables` int32 [requests, blocks] as much as the contexts reach.

    A request without tokens is padding: its context is 0, and its row any.
    """
    lengths = query_starts[1:] - query_starts[:-1]
    contexts.copy_(torch.where(lengths > 0, starts + lengths, 0))
    sample_rows.copy_((query_starts[1:] - 1).clamp(min=0))
    reached = torch.arange(step_tables.shape[1], device=tables.device) * block_tokens < contexts[:, None]
    step_tables.copy_(torch.where(reached, tables[slots.long(), : step_tables.shape[1]], step_tables))
