"""Which combinations of parameters a test tries: all of them, or enough that every pair of values occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def every(parameters: Mapping[str, Sequence[Any]]) -> list[Case]:
    """All combinations."""
    return [dict(zip(parameters, values, strict=True)) for values in product(*parameters.values())]


def pairwise(parameters: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Few combinations, the same ones each time, in which every two values of two parameters meet.

    Greedy: each case starts from a pair that has not met and takes, parameter by parameter, what makes most new pairs.
    """
    sizes = [len(values) for values in parameters.values()]
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    cases: list[Case] = []
    while missing:
        chosen = dict(min(missing))
        for place, size in enumerate(sizes):
            if place not in chosen:
                gains = [sum(pair in missing for pair in _pairs(chosen, place, index)) for index in range(size)]
                # Of equals the next in turn, or the first values would be tried with everything.
                chosen[place] = max(range(size), key=lambda index: (gains[index], -((index - len(cases)) % size)))
        for place, index in chosen.items():
            missing.difference_update(_pairs(chosen, place, index))
        cases.append({name: values[chosen[place]] for place, (name, values) in enumerate(parameters.items())})
    return cases


def _pairs(chosen: Mapping[int, int], place: int, index: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for other, value in chosen.items():
        if other != place:
            yield ((other, value), (place, index)) if other < place else ((place, index), (other, value))
