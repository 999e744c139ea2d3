"""Compiling the kernels in C, and doing without. What they compute is tests/contract/kernels' to say."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paceline import kernels
from paceline.kernels import native
from paceline.kernels.native import library
from paceline.kernels.native.quantised import quantised_of

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test loads is forgotten with it: others in this process get the twins."""
    monkeypatch.setattr(library, "_loaded", [])


@pytest.fixture
def hastily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in a fraction of the time, to slower code."""
    use_flags(monkeypatch, {"-O3": "-O0"})


def use_flags(monkeypatch: pytest.MonkeyPatch, replaced: dict[str, str]) -> None:
    monkeypatch.setattr(library, "_FLAGS", tuple(replaced.get(flag, flag) for flag in library._FLAGS))


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def kept(folder: Path) -> native.Loaded:
    """Loads, and says that what was loaded is in the folder from now on."""
    loaded = native.load(folder)
    assert isinstance(loaded, native.Loaded), loaded
    assert loaded.not_kept is None
    assert list(folder.iterdir()) == [loaded.path]
    return loaded


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_the_kernels_are_compiled_once_and_found_again(tmp_path: Path) -> None:
    first = kept(tmp_path)
    when = first.path.stat().st_mtime_ns
    assert kept(tmp_path) == first
    assert first.path.stat().st_mtime_ns == when


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_what_is_kept_is_this_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    loaded = kept(tmp_path)
    assert (tmp_path.stat().st_mode & 0o777, loaded.path.stat().st_mode & 0o777) == (0o755, 0o600)


@needs_compiler
@pytest.mark.usefixtures("hastily")
@pytest.mark.parametrize(("contents", "mode"), [(b"\x7fELF, and no more", 0o600), (b"another user's", 0o666)])
def test_a_file_that_is_damaged_or_that_others_could_write_is_made_anew(
    contents: bytes, mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    spoilt = folder / kept(tmp_path / "elsewhere").path.name
    spoilt.write_bytes(contents)
    spoilt.chmod(mode)
    assert kept(folder).path == spoilt
    assert spoilt.stat().st_mode & 0o777 == 0o600
    assert spoilt.read_bytes() != contents


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_a_file_that_was_cut_off_is_made_anew_and_never_loaded(tmp_path: Path) -> None:
    """Loading it would be answered by SIGBUS, at every start."""
    whole = kept(tmp_path / "elsewhere").path
    spoilt = tmp_path / "kernels" / whole.name
    spoilt.parent.mkdir()
    spoilt.write_bytes(whole.read_bytes()[:-4096])
    assert kept(spoilt.parent).path == spoilt
    assert spoilt.stat().st_size == whole.stat().st_size


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_a_pipe_in_its_place_is_made_anew(tmp_path: Path) -> None:
    pipe = tmp_path / "kernels" / kept(tmp_path / "elsewhere").path.name
    pipe.parent.mkdir()
    os.mkfifo(pipe, 0o600)
    assert kept(pipe.parent).path == pipe
    assert pipe.is_file()


@needs_compiler
@pytest.mark.usefixtures("hastily")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_nothing_is_loaded_from_another_users_folder(tmp_path: Path) -> None:
    there = kept(tmp_path)
    os.chown(tmp_path, 4242, -1)
    loaded = native.load(tmp_path)
    assert isinstance(loaded, native.Loaded), loaded
    assert loaded.path.parent != there.path.parent
    assert loaded.not_kept == f"others could write to {tmp_path}: it is user 4242's, with mode 0700"


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_a_folder_that_cannot_be_made_costs_only_the_keeping(tmp_path: Path) -> None:
    """As below a home that is read-only."""
    (tmp_path / "file").touch()
    loaded = native.load(tmp_path / "file" / "kernels")
    assert isinstance(loaded, native.Loaded), loaded
    assert f"Not a directory: '{tmp_path}/file" in (loaded.not_kept or "")
    assert native.is_loaded() and not loaded.path.exists()


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_what_a_killed_process_left_half_compiled_is_removed_and_what_another_compiles_is_not(tmp_path: Path) -> None:
    left, in_work = tmp_path / ".compiling-left", tmp_path / ".compiling-in-work"
    for folder in (left, in_work):
        folder.mkdir()
        (folder / "kernels.o").write_bytes(b"half")
    an_hour_ago = time.time() - 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    native.load(tmp_path)
    assert not left.exists()
    assert in_work.exists()


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_two_may_compile_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(native.load, [tmp_path, tmp_path])
    assert first == second == kept(tmp_path)


@needs_compiler
@pytest.mark.usefixtures("hastily")
def test_other_flags_or_another_compiler_make_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {kept(tmp_path / "first").path.name}
    use_flags(monkeypatch, {"-O0": "-O1"})
    names.add(kept(tmp_path / "second").path.name)
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    names.add(kept(tmp_path / "third").path.name)
    assert len(names) == 3


def test_flags_of_one_processors_compilers_go_to_no_others() -> None:
    assert "-mprefer-vector-width=512" in library.flags_for("x86_64")
    assert not [flag for flag in library.flags_for("aarch64") if flag.startswith("-mprefer")]


def computed() -> Iterator[torch.Tensor]:
    """Every kind of loop over vectors, in both dtypes, over sizes that leave a rest of rows."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, norm = (torch.randn(shape, dtype=dtype) for shape in ((11, 192), (48, 192), (192,)))
        pool = torch.randn(8, 2, 1, 2, 16, 64, dtype=dtype)
        plan = kernels.plan_attention([37, 5], [1, 1], [[3, 1, 6], [2]], pool, 20)
        yield kernels.linear(x, weight)
        yield kernels.swiglu(x)
        yield kernels.rms_norm(x, norm, 1e-5)
        yield kernels.attention(torch.randn(2, 8, 64, dtype=dtype), pool, 0, plan)


@needs_compiler
@pytest.mark.usefixtures("hastily")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there has a processor several widths")
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "native"])
def test_vectors_of_every_width_compute_what_the_twins_do(
    march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if march == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    by_twins = list(computed())
    use_flags(monkeypatch, {"-march=native": f"-march={march}"})
    kept(tmp_path)
    in_c = list(computed())
    assert not all(map(torch.equal, in_c, by_twins)), "the sums have another order"
    for ours, twins in zip(in_c, by_twins, strict=True):
        limit = 1e-5 if ours.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours, twins, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", [(63, 102), (64, 101), (64, 68)])
def test_rows_that_c_would_read_past_are_not_attached(shape: tuple[int, int]) -> None:
    weight = torch.zeros(64, 96)
    with pytest.raises(AssertionError, match=r"Q8_0 rows .* not 64 x 102"):
        kernels.attach_quantised(weight, "Q8_0", torch.zeros(shape, dtype=torch.uint8))
    assert quantised_of(weight) is None


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load(tmp_path) == native.Missing("there is no C compiler called cc")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert native.load(tmp_path / "made") == native.Missing(f"{compiler} failed: no such instruction")


@needs_compiler
def test_greedy_tokens_are_those_of_the_twins(tmp_path: Path) -> None:
    program = """
import sys, pathlib, torch
from paceline.engine.engine import Engine
from paceline.engine import weights
from paceline.checkpoint import read_config, resolve
from paceline.kernels import native
from paceline.types import RequestId, SamplingParams
source = resolve("dummy:tiny", cache_dir=pathlib.Path(sys.argv[1]), offline=True)
config = read_config(source)
loaded = weights.load(source, config, dtype=torch.float32, device="cpu")
engine = Engine(config, loaded, num_blocks=64, prefix_cache=False)
def answers(prefix):
    for i in range(5):
        prompt = [(7 * i + j) % config.vocab_size for j in range(3 + 11 * i)]
        lease = engine.try_reserve(len(prompt) + 12)
        engine.add(RequestId(f"{prefix}{i}"), prompt, SamplingParams(max_tokens=12, temperature=0.0), lease=lease)
    found = {}
    while engine.has_work:
        for done in engine.step().progress:
            found.setdefault(done.request_id[1:], []).extend(done.token_ids)
    return found
by_twins = answers("t")
assert isinstance(native.load(pathlib.Path(sys.argv[1])), native.Loaded)
assert len(by_twins) == 5 and answers("c") == by_twins, by_twins
print("equal")
"""
    assert run(program, tmp_path) == "equal\n"
