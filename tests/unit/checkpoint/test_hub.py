"""Models by hub id, from a hub of our own: a server on this machine that speaks what the library asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.numpy import save

from paceline.checkpoint import SourceKind, read_config, resolve, source
from paceline.checkpoint.hub import fetch_from_hub, is_hub_id
from paceline.checkpoint.inventory import KnownModel, known_models
from paceline.errors import CheckpointError, FetchError
from paceline.testing.checkpoints import random_tensors, write_folder, write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One repository, org/tiny, with these files."""

    files: dict[str, bytes]
    downloaded: list[str]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith(("/api/models/org/tiny/revision/", "/api/models/org/tiny/tree/")):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            answer = tree if "/tree/" in path else info
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body)
            return
        _, _, found = path.partition("/org/tiny/resolve/")
        name = found.partition("/")[2]
        if name in self.files:
            content = self.files[name]
            if body:
                self.downloaded.append(name)
            self._send(
                200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, body
            )
            return
        code = "EntryNotFound" if found else "RepoNotFound"
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": f"{code}: nothing is there"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub_files(tmp_path: Path) -> dict[str, bytes]:
    write_folder(tmp_path / "made")
    write_gguf(tmp_path / "made.gguf")
    made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    weights = save(random_tensors())
    return made | {
        "model.safetensors": weights,
        "consolidated.safetensors": weights,
        "original/model.safetensors": weights,
        "pytorch_model.bin": b"pickle",
        "tiny-q.gguf": (tmp_path / "made.gguf").read_bytes(),
    }


@pytest.fixture
def downloaded() -> list[str]:
    return []


@pytest.fixture
def endpoint(hub_files: dict[str, bytes], downloaded: list[str]) -> Iterator[str]:
    handler = type("Served", (Hub,), {"files": hub_files, "downloaded": downloaded})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_repository_is_fetched_once_and_without_what_is_not_needed(
    tmp_path: Path, endpoint: str, downloaded: list[str]
) -> None:
    folder = fetch_from_hub("org/tiny", cache_dir=tmp_path / "cache", endpoint=endpoint)
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(downloaded) == wanted
    assert fetch_from_hub("org/tiny", cache_dir=tmp_path / "cache", endpoint=endpoint) == folder
    assert len(downloaded) == len(wanted)


def test_what_is_cached_is_served_offline_and_when_the_hub_is_gone(tmp_path: Path, endpoint: str) -> None:
    folder = fetch_from_hub("org/tiny", cache_dir=tmp_path, endpoint=endpoint)
    assert fetch_from_hub("org/tiny", cache_dir=tmp_path, offline=True) == folder
    assert fetch_from_hub("org/tiny", cache_dir=tmp_path, endpoint="http://127.0.0.1:9") == folder
    found = resolve("org/tiny", cache_dir=tmp_path, offline=True)
    assert (found.kind, found.name, found.path) == (SourceKind.FOLDER, "org/tiny", folder)
    assert read_config(found).hidden_size == 64


def test_one_gguf_file_of_a_repository_can_be_named(tmp_path: Path, endpoint: str, downloaded: list[str]) -> None:
    file = fetch_from_hub("org/tiny/tiny-q.gguf", cache_dir=tmp_path, endpoint=endpoint)
    assert downloaded == ["tiny-q.gguf"]
    found = resolve("org/tiny/tiny-q.gguf", cache_dir=tmp_path, offline=True)
    assert (found.kind, found.path) == (SourceKind.GGUF, file)
    assert read_config(found).hidden_size == 64


@pytest.mark.parametrize("offline", [True, False])
def test_not_cached_and_out_of_reach_says_what_to_do(tmp_path: Path, offline: bool) -> None:
    with pytest.raises(FetchError, match=r"org/tiny is not in the cache .* run once with a network, or give the path"):
        fetch_from_hub("org/tiny", cache_dir=tmp_path, offline=offline, endpoint="http://127.0.0.1:9")


def test_a_repository_that_does_not_exist_is_named(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(FetchError, match=r"org/none is no path here, and the hub refuses it: .*404"):
        fetch_from_hub("org/none", cache_dir=tmp_path, endpoint=endpoint)


def test_a_file_that_the_repository_lacks_is_named(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(CheckpointError, match=r"org/tiny/none\.gguf: the hub's repository has no file none\.gguf"):
        fetch_from_hub("org/tiny/none.gguf", cache_dir=tmp_path, endpoint=endpoint)


def test_a_repository_without_a_config_says_how_to_name_a_gguf_file(
    tmp_path: Path, endpoint: str, hub_files: dict[str, bytes]
) -> None:
    del hub_files["config.json"]
    with pytest.raises(CheckpointError, match=r"has no config\.json; for a GGUF file in it, name it as org/tiny/FILE"):
        fetch_from_hub("org/tiny", cache_dir=tmp_path, endpoint=endpoint)


def test_a_path_that_exists_is_never_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "fetch_from_hub", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    write_folder(tmp_path / "org" / "tiny")
    assert resolve("org/tiny", cache_dir=tmp_path).path == tmp_path / "org" / "tiny"


@pytest.mark.parametrize(
    "spec", ["org/name", "org/na.me-1@main", "org/name@refs/pr/1", "org/name/sub/file.Q4_K_M.gguf"]
)
def test_hub_ids_are_told_from_paths(spec: str) -> None:
    assert is_hub_id(spec)


@pytest.mark.parametrize(
    "spec", ["name", "/org/name", "./org", "~/name", "folder/file.gguf", "a/b/c", "org/", "a/b c", ""]
)
def test_paths_are_told_from_hub_ids(spec: str) -> None:
    assert not is_hub_id(spec)


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_what_was_fetched_is_listed_by_the_names_that_serve_it(
    tmp_path: Path, endpoint: str, hub_files: dict[str, bytes], revision: str
) -> None:
    folder = fetch_from_hub(f"org/tiny{revision}", cache_dir=tmp_path, endpoint=endpoint)
    file = fetch_from_hub(f"org/tiny/tiny-q.gguf{revision}", cache_dir=tmp_path, endpoint=endpoint)
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path != file)
    listed = [model for model in known_models(tmp_path) if model.name.startswith("org/")]
    assert listed == [
        KnownModel(name=f"org/tiny{revision}", nbytes=nbytes, path=folder),
        KnownModel(name=f"org/tiny/tiny-q.gguf{revision}", nbytes=len(hub_files["tiny-q.gguf"]), path=file),
    ]
    for model in listed:
        assert resolve(model.name, cache_dir=tmp_path, offline=True).path == model.path


def test_without_a_cache_the_names_are_listed_all_the_same(tmp_path: Path) -> None:
    listed = {model.name: model for model in known_models(tmp_path / "none")}
    assert listed["smollm2-135m-instruct"].path is None
    assert listed["smollm2-135m-instruct"].nbytes == 98_362_432, "what it will take"
    assert listed["dummy:tiny"] == KnownModel(name="dummy:tiny", nbytes=None, path=None)
