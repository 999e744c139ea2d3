"""The models that can be served by name on this machine, and where they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint import dummy
from paceline.checkpoint.fetch import cached_file, is_whole
from paceline.checkpoint.hf_config import CONFIG
from paceline.checkpoint.packaged import PACKAGED_MODELS
from paceline.checkpoint.source import DUMMY_PREFIX


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model by the name that `--model` takes. `path` is None for one that has no file here."""

    name: str
    nbytes: int | None  # of its files on disk, here or once they are fetched; None for one that is built in
    path: Path | None


def known_models(cache_dir: Path) -> Iterator[KnownModel]:
    """Those with names of their own, fetched or not; those of the Hugging Face hub, fetched; those built in."""
    for model in PACKAGED_MODELS.values():
        file = cached_file(model, cache_dir)
        if is_whole(file, model):
            yield KnownModel(name=model.name, nbytes=model.file_bytes, path=file)
        else:
            yield KnownModel(name=model.name, nbytes=model.file_bytes, path=None)
    yield from _of_hub(cache_dir / "hub")
    for shape in dummy.SHAPES:
        yield KnownModel(name=f"{DUMMY_PREFIX}{shape}", nbytes=None, path=None)


def _of_hub(hub: Path) -> Iterator[KnownModel]:
    from huggingface_hub import scan_cache_dir

    if not hub.is_dir():
        return
    repos = scan_cache_dir(hub).repos
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            suffix = "" if "main" in revision.refs else f"@{min(revision.refs, default=revision.commit_hash)}"
            yield from _of_revision(repo.repo_id, revision, suffix)


def _of_revision(repo_id: str, revision: Any, suffix: str) -> Iterator[KnownModel]:
    """A folder of weights as one model, and each GGUF file as one of its own."""
    folder: Path = revision.snapshot_path
    ggufs = {file for file in revision.files if file.file_name.endswith(".gguf")}
    if any(file.file_path == folder / CONFIG for file in revision.files):
        nbytes = sum(file.size_on_disk for file in revision.files - ggufs)
        yield KnownModel(name=f"{repo_id}{suffix}", nbytes=nbytes, path=folder)
    for file in sorted(ggufs, key=lambda file: str(file.file_path)):
        name = f"{repo_id}/{file.file_path.relative_to(folder)}{suffix}"
        yield KnownModel(name=name, nbytes=file.size_on_disk, path=file.file_path)
