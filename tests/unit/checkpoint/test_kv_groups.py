"""How layers are grouped by their windows, and what each group's tables must hold."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.dummy import SHAPES
from paceline.checkpoint.kv_groups import KvGroups
from paceline.types import BLOCK_TOKENS, blocks_for, blocks_in_groups


def groups_of(*windows: int | None) -> KvGroups:
    return KvGroups.of(msgspec.structs.replace(SHAPES["tiny"], num_layers=len(windows), windows=windows))


def test_a_model_without_windows_has_one_group_of_all_its_layers() -> None:
    groups = KvGroups.of(SHAPES["llama-3.1-8b"])
    assert (groups.layers, groups.windows) == (32, (None,))
    assert groups.places == tuple((0, layer) for layer in range(32))
    assert not groups.windowed


def test_a_model_whose_layers_all_have_one_window_has_one_group_with_it() -> None:
    groups = groups_of(*[4096] * 32)
    assert (groups.layers, groups.windows) == (32, (4096,))
    assert groups.places == tuple((0, layer) for layer in range(32))


def test_gemma_3_270m_has_six_groups_of_three_layers_and_what_sees_everything_comes_first() -> None:
    groups = groups_of(*[512, 512, 512, 512, 512, None] * 3)
    assert (groups.layers, groups.windows) == (3, (None, 512, 512, 512, 512, 512))
    assert [groups.places[layer] for layer in (5, 11, 17)] == [(0, 0), (0, 1), (0, 2)]
    assert [groups.places[layer] for layer in (0, 1, 2, 3, 4, 6)] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize(
    ("local", "every", "layers", "groups"),
    [(22, 4, 4, 7), (29, 5, 5, 7), (40, 8, 8, 6), (52, 10, 10, 7), (6, 1, 1, 7), (7, 21, 7, 4)],
    ids=["Gemma 3 1B", "4B", "12B", "27B", "one that sees all", "Qwen2 7B"],
)
def test_groups_are_as_large_as_an_eighth_of_padding_allows(local: int, every: int, layers: int, groups: int) -> None:
    found = groups_of(*[512] * local, *[None] * every)
    assert (found.layers, len(found)) == (layers, groups)


@given(st.lists(st.sampled_from([None, 16, 40, 512]), min_size=1, max_size=80))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows: list[int | None]) -> None:
    groups = groups_of(*windows)
    assert len(set(groups.places)) == len(windows)
    for window, (group, index) in zip(windows, groups.places, strict=True):
        assert groups.windows[group] == window
        assert 0 <= index < groups.layers
    assert len(groups) * groups.layers * 7 / 8 <= len(windows)
    assert None not in groups.windows[sum(window is None for window in groups.windows) :]


@given(st.integers(1, 600), st.integers(1, 200), st.integers(1, 80))
def test_a_windowed_table_never_has_more_blocks_at_once_than_it_says(stored: int, window: int, chunk: int) -> None:
    groups = groups_of(window)
    [most] = groups.most_blocks(chunk)
    assert most is not None
    [first] = groups.first_read(stored)
    assert first * BLOCK_TOKENS <= max(0, stored + 1 - window) < (first + 1) * BLOCK_TOKENS
    assert blocks_for(stored + chunk) - first <= most


@pytest.mark.parametrize(
    ("num_tokens", "held", "places"),
    [
        (15, 0, range(0, 1)),
        (16, 0, range(0, 1)),
        (31, 0, range(1, 2)),  # the next token is at 31, and sees 16 to 31
        (30, 0, range(0, 2)),  # that at 30 sees 15
        (100, 0, range(5, 7)),
        (100, 6, range(6, 7)),
        (96, 0, range(5, 6)),
        (95, 0, range(5, 6)),
    ],
)
def test_what_is_sent_of_a_windowed_group_is_what_the_next_token_reads(
    num_tokens: int, held: int, places: range
) -> None:
    groups = groups_of(None, 16)
    assert groups.missing(num_tokens, held) == [range(held, blocks_for(num_tokens)), places]


def test_a_window_of_one_token_needs_nothing_of_a_prompt_that_fills_its_blocks() -> None:
    assert groups_of(1).missing(32, 0) == [range(2, 2)]
    assert groups_of(1).missing(33, 0) == [range(2, 3)]


def test_a_request_is_counted_by_all_of_its_tables() -> None:
    assert blocks_in_groups(4_096, (None,)) == 256
    assert blocks_in_groups(4_096, (None, *[65] * 5)) == 256 + 5 * 65
    assert blocks_in_groups(100, (None, *[65] * 5)) == 6 * 7
