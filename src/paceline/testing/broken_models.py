"""Model files that are broken in the ways that files break, each with what the error must name."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from paceline.checkpoint import ModelConfig
from paceline.checkpoint.dummy import SHAPES
from paceline.testing.checkpoints import random_tensors, write_folder, write_gguf

NAME = "model.safetensors"


@dataclass(frozen=True)
class Broken:
    """`model` is what a user would pass; `parts` are what the message must name."""

    name: str
    model: Path
    parts: tuple[str, ...]


def write_model(folder: Path, *, seed: int = 0, config: ModelConfig = SHAPES["tiny"]) -> Path:
    """A whole Hugging Face folder with random weights, a tokenizer and a chat template."""
    write_folder(folder, config=config)
    save_file(random_tensors(config, seed), folder / NAME)
    return folder


def broken_gguf(folder: Path) -> Iterator[Broken]:
    """GGUF files."""
    good = folder / "good.gguf"
    write_gguf(good)
    data = good.read_bytes()
    yield _file(folder, "empty.gguf", b"", ())
    yield _file(folder, "garbage.gguf", bytes(range(256)) * 64, ("GGUF",))
    yield _file(folder, "magic.gguf", b"GGML" + data[4:], ("GGUF", "GGML"))
    yield _file(folder, "version.gguf", data[:4] + struct.pack("<I", 99) + data[8:], ("version", "99"))
    yield _file(folder, "header-cut.gguf", data[:200], ())
    yield _file(folder, "tensors-cut.gguf", data[: len(data) // 2], ())
    yield _file(folder, "many-tensors.gguf", data[:8] + struct.pack("<Q", 2**60) + data[16:], ())
    no_heads = folder / "no-heads.gguf"
    write_gguf(no_heads, changes={"llama.attention.head_count": None})
    yield Broken("a GGUF file without head_count", no_heads, ("head_count",))
    other = folder / "architecture.gguf"
    write_gguf(other, changes={"general.architecture": "mamba"})
    yield Broken("a GGUF file of another architecture", other, ("mamba", "llama"))


def broken_safetensors(folder: Path) -> Iterator[Broken]:
    """Hugging Face folders."""
    whole = (write_model(folder / "whole") / NAME).read_bytes()
    yield _folder(folder, "cut", whole[: len(whole) // 2])
    yield _folder(folder, "header-cut", whole[:50])
    yield _folder(folder, "empty", b"")
    yield _folder(folder, "garbage", bytes(range(256)) * 64)
    yield _folder(folder, "huge-header", struct.pack("<Q", 2**62) + whole[8:])
    yield _folder(folder, "none", None, ".safetensors")
    tensors = load_file(folder / "whole" / NAME)
    missing = "model.layers.1.mlp.up_proj.weight"
    yield _tensors(folder, "a-tensor-missing", {k: v for k, v in tensors.items() if k != missing}, missing)
    wrong = np.zeros((3, 3), np.float32)
    yield _tensors(folder, "a-tensor-of-another-shape", {**tensors, missing: wrong}, missing, "3")
    config = folder / "no-config"
    config.mkdir()
    yield Broken("a folder without config.json", config, ("config.json",))
    garbled = write_model(folder / "garbled-config")
    (garbled / "config.json").write_text("{not json")
    yield Broken("a config.json that is no JSON", garbled, ("config.json",))
    absurd = write_model(folder / "absurd-config")
    settings = json.loads((absurd / "config.json").read_text())
    (absurd / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": -3}))
    yield Broken("a config.json with -3 layers", absurd, ("num_layers", "-3"))


def _file(folder: Path, name: str, data: bytes, parts: tuple[str, ...]) -> Broken:
    path = folder / name
    path.write_bytes(data)
    return Broken(f"GGUF: {path.stem}", path, (name, *parts))


def _folder(folder: Path, name: str, data: bytes | None, *parts: str) -> Broken:
    model = write_model(folder / name)
    if data is None:
        (model / NAME).unlink()
    else:
        (model / NAME).write_bytes(data)
    return Broken(f"safetensors: {name}", model, parts or (NAME,))


def _tensors(folder: Path, name: str, tensors: dict[str, np.ndarray], *parts: str) -> Broken:
    model = write_model(folder / name)
    save_file(tensors, model / NAME)
    return Broken(f"safetensors: {name}", model, parts)
