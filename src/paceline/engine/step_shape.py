"""The padded sizes of steps: a step is computed by the graph of the smallest shape that holds it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

_FEW_REQUESTS: Final = 16
"""Requests up to which a step with prompts gets a shape of its own: a prefill worker's seldom has more."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for `tokens` tokens of `requests` requests; of one each where `decodes`."""

    tokens: int
    requests: int
    decodes: bool


class StepShapes:
    """The shapes for steps of at most `token_budget` tokens of at most `max_requests` requests."""

    def __init__(self, token_budget: int, max_requests: int) -> None:
        self._decodes = _decode_sizes(min(max_requests, token_budget))
        self._tokens = _prompt_sizes(token_budget)
        self._requests = sorted({min(_FEW_REQUESTS, max_requests), max_requests})

    @property
    def all(self) -> list[StepShape]:
        """The largest first, so that graphs captured later find room in the memory of the earlier ones."""
        decodes = [StepShape(size, size, decodes=True) for size in self._decodes]
        prompts = [StepShape(size, requests, decodes=False) for size in self._tokens for requests in self._requests]
        return sorted(prompts + decodes, key=lambda shape: (-shape.tokens, -shape.requests))

    def of(self, tokens: int, requests: int) -> StepShape:
        """The smallest for a step of so many."""
        if tokens == requests:
            size = self._decodes[bisect_left(self._decodes, requests)]
            return StepShape(size, size, decodes=True)
        return StepShape(
            self._tokens[bisect_left(self._tokens, tokens)],
            self._requests[bisect_left(self._requests, requests)],
            decodes=False,
        )


def _decode_sizes(most: int) -> list[int]:
    """Powers of two, then steps that pad by an eighth or less: a decode's time hangs on the requests' KV, mostly."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 1 << ((sizes[-1]).bit_length() - 3)))
    return sorted({min(size, most) for size in sizes})


def _prompt_sizes(most: int) -> list[int]:
    """Small ones as powers of two; then steps of 128, since a padded token costs what a real one does."""
    sizes = [16, 32, 64, 128, *range(256, most, 128), most]
    return sorted({min(size, most) for size in sizes})
