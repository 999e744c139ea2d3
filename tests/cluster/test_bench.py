"""`paceline bench` against real processes, in each of its ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.testing.cluster import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster.start(prefill=1, decode=1) as running:
        yield running


@pytest.mark.parametrize(
    "load",
    [
        ("--rate=20", "--slo-ttft-ms=30000"),
        ("--concurrency=4", "--processes=2"),
        ("--concurrency=16",),
    ],
    ids=["open", "closed", "all at once"],
)
def test_every_answer_is_whole_and_every_block_comes_back(cluster: Cluster, tmp_path: Path, load: tuple[str]) -> None:
    file = tmp_path / "result.json"
    lengths = ("--requests=16", "--input-len=100", "--output-len=12", "--sample-s=0.1")
    assert main(["bench", f"--router={cluster.address}", *lengths, *load, f"--json={file}"]) == 0
    result = json.loads(file.read_text())
    summary = result["summary"]
    assert (summary["succeeded"], summary["input_tokens"], summary["output_tokens"]) == (16, 1600, 192)
    assert (summary["handovers"]["through_prefill"], summary["handovers"]["blocks"]) == (16, 16 * 7)
    assert summary["cached_tokens"] == 0, "no run finds the prompts of another"
    assert all(request["served"]["first_token_s"] <= request["ttft_s"] for request in result["requests"])
    assert {pool["worker"] for pool in result["pools"]} <= {"prefill-0", "decode-0"}
    cluster.wait_idle()


def test_a_shared_prefix_is_found_in_the_cache(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    lengths = ("--requests=8", "--input-len=128", "--output-len=2", "--shared-prefix=0.5", "--concurrency=1")
    assert main(["bench", f"--router={cluster.address}", *lengths, f"--json={file}"]) == 0
    assert json.loads(file.read_text())["summary"]["cached_tokens"] == 8 * 64, "the warm-up filled it"
    cluster.wait_idle()
