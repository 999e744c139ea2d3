"""How much of a prompt is cached, where layers that see a window have let go of what lies before it.

A hit of some length needs all blocks of the groups without a window, and of the others those that the next token's
window reaches. The longest such hit is the prompt's. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.checkpoint.kv_groups import KvGroups
from paceline.engine.block_lease import Hit
from paceline.engine.prefix_cache import PrefixCache
from paceline.prefix import BlockHash
from paceline.types import BLOCK_TOKENS


def find_hit(cache: PrefixCache, hashes: Sequence[BlockHash], groups: KvGroups) -> Hit:
    """The longest beginning of a chain of which `cache` has what whoever goes on behind it reads."""
    full = [cache.find(hashes, group=group) for group, window in enumerate(groups.windows) if window is None]
    reach = min(map(len, full), default=len(hashes))
    if not groups.windowed:
        return Hit(reach, tuple(table[:reach] for table in full))
    while reach and (hole := _last_hole(cache, hashes, groups, reach)) is not None:
        reach = hole  # it lies in the window behind every place between
    tables: list[list[int]] = []
    for group, first in enumerate(groups.first_read(reach * BLOCK_TOKENS)):
        tables.append(cache.find(hashes[first:reach], group=group))
    return Hit(reach, tuple(tables))


def _last_hole(cache: PrefixCache, hashes: Sequence[BlockHash], groups: KvGroups, reach: int) -> int | None:
    """The last place that a hit up to `reach` needs and that isn't there, in the first group that lacks one."""
    for group, first in enumerate(groups.first_read(reach * BLOCK_TOKENS)):
        if groups.windows[group] is None:
            continue
        for place in range(reach - 1, first - 1, -1):
            if cache.get(hashes[place], group) is None:
                return place
    return None
