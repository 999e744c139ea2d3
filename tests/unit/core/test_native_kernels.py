"""Compiling the kernels in C, and doing without. What they compute is tests/contract/kernels' to say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def run(program: str, *arguments: object) -> str:
    """In a process of its own: kernels that are loaded stay."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@needs_compiler
def test_the_kernels_are_compiled_once_and_found_again(tmp_path: Path) -> None:
    program = (
        "import sys, torch, pathlib; from paceline.kernels import native; print(native.load(pathlib.Path(sys.argv[1])))"
    )
    first = run(program, tmp_path)
    assert first.startswith("Loaded"), first
    [made] = tmp_path.iterdir()
    when = made.stat().st_mtime_ns
    assert run(program, tmp_path) == first
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [when]


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
