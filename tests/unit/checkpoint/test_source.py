from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from paceline.checkpoint import Source, SourceKind, digest, read_config, resolve
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import random_tensors, write_folder, write_gguf


@pytest.mark.parametrize("shape", SHAPES)
def test_each_built_in_shape_resolves_and_makes_a_model(tmp_path: Path, shape: str) -> None:
    source = resolve(f"dummy:{shape}", cache_dir=tmp_path)
    assert source == Source(SourceKind.DUMMY, f"dummy:{shape}", None)
    config = read_config(source)
    assert config.checked("here").name == source.name


def test_a_path_resolves_by_what_lies_there(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    write_folder(tmp_path / "folder")
    assert resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path) == Source(
        SourceKind.GGUF, "tiny", tmp_path / "tiny.gguf"
    )
    assert resolve(str(tmp_path / "folder"), cache_dir=tmp_path) == Source(
        SourceKind.FOLDER, "folder", tmp_path / "folder"
    )
    for spec in (f"dummy:{tmp_path / 'folder'}", f"dummy:{tmp_path / 'folder' / 'config.json'}"):
        source = resolve(spec, cache_dir=tmp_path)
        assert (source.kind, source.name) == (SourceKind.DUMMY, "dummy:folder")
        assert read_config(source).hidden_size == SHAPES["tiny"].hidden_size


@pytest.mark.parametrize(
    "spec", ["", "gpt-17", "no/such.gguf", "dummy:", "dummy:none", "/", __file__, "a\0b", "dummy:\0"]
)
def test_anything_else_is_refused_with_a_list_of_what_is_accepted(tmp_path: Path, spec: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"Accepted are: smollm2-135m-instruct; gemma3-270m; the path of a \.gguf"
    ):
        resolve(spec, cache_dir=tmp_path)


def save_folder(folder: Path, *, seed: int = 0) -> Source:
    write_folder(folder)
    save_file(random_tensors(seed=seed), folder / "model.safetensors")
    return Source(SourceKind.FOLDER, folder.name, folder)


def test_the_digest_is_the_same_for_copies_and_another_for_other_weights(tmp_path: Path) -> None:
    first = digest(save_folder(tmp_path / "a"))
    assert digest(save_folder(tmp_path / "b")) == first
    assert digest(save_folder(tmp_path / "c", seed=1)) != first
    assert len(first) == 32


def test_the_digest_sees_one_changed_tensor_and_a_changed_shape(tmp_path: Path) -> None:
    source = save_folder(tmp_path / "a")
    first = digest(source)
    tensors = random_tensors()
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert digest(source) != first
    save_file(random_tensors(), tmp_path / "a" / "model.safetensors")
    assert digest(source) == first
    write_folder(tmp_path / "a", changes={"rope_theta": 12_345.0})
    assert digest(source) != first


def test_a_gguf_files_digest_sees_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path)
    source = Source(SourceKind.GGUF, "a", path)
    first = digest(source)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert digest(source) != first


def test_a_dummys_digest_depends_on_shape_and_seed() -> None:
    tiny = Source(SourceKind.DUMMY, "dummy:tiny", None)
    other = Source(SourceKind.DUMMY, "dummy:smollm2-135m", None)
    assert len({digest(tiny), digest(tiny, seed=1), digest(other)}) == 3
    assert digest(tiny, seed=1) == digest(tiny, seed=1)
