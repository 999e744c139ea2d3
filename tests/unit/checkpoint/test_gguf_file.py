from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import Source, SourceKind, open_tensors, read_config
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import write_gguf


def source_of(path: Path) -> Source:
    return Source(SourceKind.GGUF, "tiny", path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def test_the_metadata_becomes_a_model_config(tiny: Path) -> None:
    config = read_config(source_of(tiny))
    expected = SHAPES["tiny"]
    assert config.norm_eps == pytest.approx(expected.norm_eps)
    for field in ("vocab_size", "hidden_size", "num_kv_heads", "head_dim", "context_tokens", "tied_embeddings"):
        assert getattr(config, field) == getattr(expected, field)
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id == 1


def test_an_end_of_turn_control_token_ends_a_turn_beside_the_named_eos(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, changes={"tokenizer.ggml.eos_token_id": 0})
    assert read_config(source_of(path)).eos_token_ids == (0, 2)


def test_query_and_key_rows_come_back_in_hugging_faces_order(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path)
    with open_tensors(source_of(path)) as tensors:
        assert tensors.infos.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(tensors.read(name).array, values, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "8 rotated dimensions"),
        ({"llama.attention.head_count": "four"}, "llama.attention.head_count is 'four', expected one integer"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads are no multiple of 3 KV heads"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ({"tokenizer.ggml.eos_token_id": 512}, r"the special token id 512 is not in the vocabulary, \[0, 512\)"),
        ({"general.alignment": 12}, "general.alignment is 12"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path, changes=changes)
    with pytest.raises(CheckpointError, match=named) as caught:
        read_config(source_of(path))
    assert str(path) in str(caught.value)


def test_another_architecture_is_named_with_those_that_are_supported(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes().replace(b"llama", b"mamba", 1))
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'mamba', supported are llama"):
        read_config(source_of(tiny))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "the file is empty"),
        (b"GG", "ends at byte 2"),
        (b"PK\x03\x04" + bytes(100), "no GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "more than the file's 24 bytes can hold"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        read_config(source_of(path))


def test_a_file_cut_short_anywhere_is_a_checkpoint_error(tmp_path: Path, tiny: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 4_000, 97), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"), open_tensors(source_of(cut)):
            pass


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_read_as_something_or_raise_a_checkpoint_error(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    whole, path = tmp_path / "whole.gguf", tmp_path / "flipped.gguf"
    if not whole.exists():
        write_gguf(whole)
    content = bytearray(whole.read_bytes())
    for at, value in flips:
        content[at] = value
    path.write_bytes(content)
    try:
        with open_tensors(source_of(path)) as tensors:
            for name in tensors.infos:
                tensors.read(name)
    except CheckpointError as error:
        assert str(path) in str(error)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_config(source_of(tmp_path / "none.gguf"))
