from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from paceline.cli.variables import unknown_variables


def test_a_misspelt_variable_is_found_with_what_was_meant() -> None:
    env = {
        "PACELINE_POOL_BLOCK": "9",
        "PACELINE_XYZ": "1",
        "PACELINE_POOL_BLOCKS": "9",
        "PACELINE_ROUTER": "a:1",
        "PACELINE_PORT": "7070",
        "PACELINE_CACHE": "models",
        "PATH": "/bin",
    }
    assert unknown_variables(env) == {"PACELINE_POOL_BLOCK": "PACELINE_POOL_BLOCKS", "PACELINE_XYZ": None}


def test_every_variable_that_the_compose_file_reads_is_known() -> None:
    text = (Path(__file__).parents[3] / "compose.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"PACELINE_[A-Z_]+", text))
    assert len(names) > 5
    assert unknown_variables(dict.fromkeys(names, "")) == {}


def test_up_warns_of_a_misspelt_variable_and_goes_on(tmp_path: Path) -> None:
    env = {**os.environ, "PACELINE_MODLE": "x", "PACELINE_RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-P", "-m", "paceline.cli", "up", "--model", "no-such-model", "--log-json"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert '"variable":"PACELINE_MODLE"' in run.stderr.replace(" ", "")
    assert "PACELINE_MODEL" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert run.returncode == 2
