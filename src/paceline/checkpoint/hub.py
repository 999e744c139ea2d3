"""Models by their ids on the Hugging Face hub, by its own library, which knows its tokens, mirrors and proxies."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final

from paceline.checkpoint.hf_config import CONFIG
from paceline.errors import CheckpointError, DiskFull, FetchError

_ID: Final = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?")
_WANTED: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)
# Other forms of the same weights.
_UNWANTED: Final = ("*/*", "consolidated*")


def is_hub_id(spec: str) -> bool:
    """Whether `spec` looks like `org/name`, `org/name@revision` or `org/name/file.gguf`."""
    match = _ID.fullmatch(spec)
    return match is not None and (match["file"] is not None or not match["repo"].endswith(".gguf"))


def fetch_from_hub(spec: str, *, cache_dir: Path, offline: bool = False, endpoint: str | None = None) -> Path:
    """The folder, or the GGUF file, that the hub id names; what the cache lacks of it is downloaded.

    Without a network, and with `offline`, the cache alone is looked at. `endpoint` is the hub's address, by default the
    library's. Raises `FetchError`, `DiskFull`, and `CheckpointError` for a repository that holds no such model.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    match = _ID.fullmatch(spec)
    assert match is not None, f"{spec} is no hub id"
    repo, file, revision = match["repo"], match["file"], match["revision"]
    hub = cache_dir / "hub"
    try:
        if file is not None:
            return Path(
                hf_hub_download(
                    repo, file, revision=revision, cache_dir=hub, local_files_only=offline, endpoint=endpoint
                )
            )
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=hub,
                local_files_only=offline,
                endpoint=endpoint,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except LocalEntryNotFoundError as error:
        why = "this is offline" if offline else "the hub cannot be reached"
        raise FetchError(
            f"{spec} is not in the cache ({hub}) and {why}: run once with a network, or give the path of a folder or "
            "of a .gguf file as the model"
        ) from error
    except EntryNotFoundError as error:
        raise CheckpointError(f"{spec}: the hub's repository has no file {file}") from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FetchError(f"{spec} is no path here, and the hub refuses it: {_first_line(error)}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"fetching {spec} filled the disk of {hub}: make room or choose another cache folder") from (
                error
            )
        raise FetchError(f"{spec} cannot be fetched into {hub}: {error.strerror or error}") from error
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{spec}: the repository has no {CONFIG}; for a GGUF file in it, name it as {repo}/FILE.gguf"
        )
    return folder


def _first_line(error: Exception) -> str:
    """What the library says at more length than a reader needs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]
