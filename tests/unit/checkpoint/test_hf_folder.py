from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.checkpoint import Source, SourceKind, open_tensors, read_config
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import random_tensors, write_folder


def source_of(folder: Path) -> Source:
    return Source(SourceKind.FOLDER, folder.name, folder)


def test_config_json_becomes_a_model_config(tmp_path: Path) -> None:
    write_folder(tmp_path / "dummy:tiny")
    assert read_config(source_of(tmp_path / "dummy:tiny")) == SHAPES["tiny"]


def test_eos_ids_are_those_of_the_config_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    write_folder(tmp_path, changes={"eos_token_id": 7})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    settings = {"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"11": {"content": "<e>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_config(source_of(tmp_path)).eos_token_ids == (7, 9, 11)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported are LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rotary embeddings scaled by 'yarn'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "big"}, "hidden_size is 'big', expected one integer"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": -1}, "num_layers is -1"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    write_folder(tmp_path, changes=changes)
    with pytest.raises(CheckpointError, match=named):
        read_config(source_of(tmp_path))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None},
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0},
    ],
)
def test_rotary_parameters_are_read_in_both_spellings(tmp_path: Path, rope: dict[str, object]) -> None:
    write_folder(tmp_path, changes=rope)
    assert read_config(source_of(tmp_path)).rope_theta == 7.0


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: this is not a JSON object"):
        read_config(source_of(tmp_path))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    expected = random_tensors()
    names = sorted(expected)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: expected[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray": np.zeros(1, np.float32)}, tmp_path / "stray.safetensors")
    with open_tensors(source_of(tmp_path)) as tensors:
        assert sorted(tensors.infos) == names
        for name in names:
            np.testing.assert_array_equal(tensors.read(name).array, expected[name])


def test_a_tensor_that_the_index_promises_and_no_file_has_is_named(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "a.safetensors"}}))
    with (
        pytest.raises(CheckpointError, match=r"tensor 'b' is not in 'a\.safetensors'"),
        open_tensors(source_of(tmp_path)),
    ):
        pass


def test_an_index_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "../secret"}}))
    with (
        pytest.raises(CheckpointError, match="not the name of a file in the folder"),
        open_tensors(source_of(tmp_path)),
    ):
        pass


def safetensors_bytes(header: dict[str, object] | bytes, data: bytes = b"", claim: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if claim is None else claim) + encoded + data


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "the file is empty"),
        (b"abc", "its header claims"),
        (safetensors_bytes({}, claim=2**40), "its header claims 1099511627776 bytes"),
        (safetensors_bytes(b"nonsense"), "its header is damaged"),
        (safetensors_bytes({"a": {"dtype": "F32"}}), "its header is damaged"),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "its header is damaged"),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "does not fit"),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8)), "does not fit"),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7)), "cut short"),
    ],
)
def test_a_damaged_safetensors_file_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=named) as caught, open_tensors(source_of(tmp_path)):
        pass
    assert "model.safetensors" in str(caught.value)


def test_a_type_that_is_not_served_is_named(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.int64)}, tmp_path / "model.safetensors")
    with open_tensors(source_of(tmp_path)) as tensors, pytest.raises(CheckpointError, match=r"'I64'.*F32, F16, BF16"):
        tensors.read("a")


def test_an_error_while_values_are_in_use_is_not_replaced_by_one_from_closing(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mine"), open_tensors(source_of(tmp_path)) as tensors:
        kept = tensors.read("a")
        raise CheckpointError(f"mine {kept.array.shape}")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file is there"), open_tensors(source_of(tmp_path)):
        pass
