"""Reading of a resolved source: its shape, its tensors, and the digest that tells two checkpoints apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from paceline.checkpoint import dummy, gguf_config, gguf_file, hf_config, hf_folder
from paceline.checkpoint.gguf_header import read_header
from paceline.checkpoint.model_config import ModelConfig
from paceline.checkpoint.source import DUMMY_PREFIX, Source, SourceKind
from paceline.checkpoint.tensors import Tensors

_SAMPLE_BYTES: Final = 4_096
_SAMPLES: Final = 4  # of each tensor
_DIGEST_BYTES: Final = 16
_DIGEST_VERSION: Final = b"paceline-weights-1"


def read_config(source: Source) -> ModelConfig:
    """The model's shape; reads headers alone. Raises `CheckpointError`."""
    if source.kind is SourceKind.GGUF:
        return gguf_config.model_config(read_header(_path(source)), source.name)
    if source.kind is SourceKind.FOLDER:
        return hf_config.model_config(_path(source) / hf_config.CONFIG, source.name)
    if source.path is None:
        return dummy.SHAPES[source.name.removeprefix(DUMMY_PREFIX)]
    return hf_config.model_config(source.path, source.name)


@contextmanager
def open_tensors(source: Source) -> Iterator[Tensors]:
    """The tensors of a GGUF file or a folder, until the block ends. Raises `CheckpointError`; a dummy has none."""
    assert source.kind is not SourceKind.DUMMY, "a dummy has a shape and no tensors"
    tensors: Tensors
    if source.kind is SourceKind.GGUF:
        header = read_header(_path(source))
        tensors = gguf_file.GgufTensors(header, gguf_config.model_config(header, source.name))
    else:
        tensors = hf_folder.SafetensorsTensors(_path(source))
    with closing(tensors):
        yield tensors


def digest(source: Source, *, seed: int = 0) -> str:
    """32 hex digits that stand for the weights in a fingerprint; the same on every machine and for every path.

    Hashed are the model's shape, each tensor's name, shape and encoding, and four samples of 4 KiB of its bytes, evenly
    spaced from its first to its last. So checkpoints that differ in a whole tensor, as after training, merging or
    another quantisation, get different digests, and a few bytes changed inside a tensor may go unseen: it guards
    against a mix-up, not against an adversary, and costs milliseconds where a hash of all of 16 GB would cost a minute
    at each start. `seed` is hashed for a dummy only.
    """
    state = blake2b(_DIGEST_VERSION, digest_size=_DIGEST_BYTES)
    # The name is a matter of where the file lies.
    state.update(msgspec.json.encode(msgspec.structs.replace(read_config(source), name="")))
    if source.kind is SourceKind.DUMMY:
        state.update(f"dummy seed {seed}".encode())
        return state.hexdigest()
    with open_tensors(source) as tensors:
        for name, info in sorted(tensors.infos.items()):
            state.update(msgspec.json.encode(info))
            with tensors.stored(name) as stored:
                for part in range(_SAMPLES):
                    start = max(0, info.nbytes - _SAMPLE_BYTES) * part // (_SAMPLES - 1)
                    with stored[start : start + _SAMPLE_BYTES] as sample:
                        state.update(sample)
    return state.hexdigest()


def _path(source: Source) -> Path:
    assert source.path is not None, "only a dummy may have no path"
    return source.path
