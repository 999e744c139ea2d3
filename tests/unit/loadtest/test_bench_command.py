"""`paceline bench` as a shell runs it, with its generator processes, against servers whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import errors
from paceline.cli import main
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.measure import measure
from paceline.loadtest.plots import check_plots, figures
from paceline.loadtest.record import check_json
from paceline.protos import common_pb2, router_pb2
from paceline.testing.openai_server import openai_server
from paceline.testing.scripted_router import ScriptedRouter, scripted_router, worker


def answer(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
    """As many tokens as were asked for, the first two together, and a hand-over of two blocks."""
    count = request.sampling.max_tokens
    yield router_pb2.GenerateResponse(token_ids=[1, 2], token_index=0)
    for place in range(2, count):
        yield router_pb2.GenerateResponse(token_ids=[place], token_index=place)
    finish = router_pb2.Finish(
        reason=common_pb2.FINISH_REASON_LENGTH,
        usage=common_pb2.Usage(prompt_tokens=len(request.tokens.ids), completion_tokens=count),
        transfer=common_pb2.Transfer(blocks=2, bytes=4096, parts=1),
        prefill_worker=common_pb2.WorkerKey(worker_id="prefill-0", epoch=7),
        attempts=1,
    )
    yield router_pb2.GenerateResponse(token_index=count, finish=finish)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRouter]:
    with scripted_router() as running:
        running.script = answer
        running.loads.workers.append(worker("decode-0", common_pb2.ROLE_DECODE))
        monkeypatch.setenv("PACELINE_ROUTER", running.address)
        yield running


def bench(tmp_path: Path, *flags: str) -> tuple[int, Any]:
    file = tmp_path / "out" / "result.json"
    status = main(["bench", "--input-len=20", "--output-len=6", f"--json={file}", *flags])
    return status, json.loads(file.read_text())


@pytest.mark.parametrize("load", ["--rate=200", "--concurrency=3", "--concurrency=30"])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_request_is_sent_once_and_measured(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str], load: str, processes: int
) -> None:
    status, result = bench(tmp_path, load, "--requests=30", "--warmup=2", f"--processes={processes}")
    assert status == 0, capsys.readouterr()
    summary = result["summary"]
    assert (summary["sent"], summary["succeeded"], summary["errors"]) == (30, 30, {})
    assert (summary["input_tokens"], summary["output_tokens"], summary["tokens_per_message"]) == (600, 180, 1.2)
    assert (summary["ttft_s"]["count"], summary["itl_s"]["count"], summary["e2e_s"]["count"]) == (30, 120, 30)
    assert (summary["handovers"]["through_prefill"], summary["handovers"]["bytes"]) == (30, 30 * 4096)
    assert [request["index"] for request in result["requests"]] == list(range(30))
    assert len(router.requests) == 32, "the warm-up is sent, and is in no figure"
    assert len({tuple(request.tokens.ids) for request in router.requests}) == 32
    assert len({request.cache_salt for request in router.requests}) == 1
    assert "time to first token" in capsys.readouterr().out


def test_an_open_loop_sends_at_its_moments_whatever_is_not_answered(router: ScriptedRouter, tmp_path: Path) -> None:
    all_there = threading.Barrier(8)

    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        all_there.wait(30)  # raises where the requests do not come together
        yield from answer(request)

    router.script = script
    status, result = bench(tmp_path, "--rate=50", "--requests=8", "--warmup=0")
    assert status == 0
    assert all(request["sent_s"] >= request["scheduled_s"] for request in result["requests"])
    assert result["summary"]["lateness_s"]["count"] == 8


def test_a_closed_loop_always_has_as_many_under_way_as_it_may(router: ScriptedRouter, tmp_path: Path) -> None:
    under_way = most = 0
    lock = threading.Lock()
    all_three = threading.Barrier(3)

    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        all_three.wait(30)  # raises where not as many come together
        with lock:
            under_way -= 1
        yield from answer(request)

    router.script = script
    status, result = bench(tmp_path, "--concurrency=3", "--requests=18", "--processes=2", "--warmup=0")
    assert (status, most) == (0, 3)
    assert result["summary"]["lateness_s"] is None


def test_a_closed_loop_ends_by_the_clock(router: ScriptedRouter, tmp_path: Path) -> None:
    status, result = bench(tmp_path, "--concurrency=2", "--duration-s=0.3")
    assert status == 0
    assert max(request["ended_s"] for request in result["requests"]) > 0.3, "until then each end is followed by another"


def test_failures_are_counted_by_reason_and_told_by_the_status(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        place = len(router.requests) % 3
        if place == 0:
            raise errors.Overloaded("the queue is full", retry_after_s=1)
        yield from list(answer(request))[place - 1 :]  # from the second message on, a gap

    router.script = script
    status, result = bench(tmp_path, "--concurrency=1", "--requests=9", "--warmup=0")
    assert status == 1
    assert result["summary"]["errors"] == {"BROKEN_STREAM": 3, "OVERLOADED": 3}
    assert "3 x OVERLOADED: the queue is full" in capsys.readouterr().out


def test_pools_are_looked_at_while_the_run_goes_on(router: ScriptedRouter, tmp_path: Path) -> None:
    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        assert router.looks.acquire(timeout=30)
        yield from answer(request)

    router.script = script
    _, result = bench(tmp_path, "--concurrency=1", "--requests=2", "--sample-s=0.05", "--warmup=0")
    [pool] = result["pools"]
    # Looks follow one another: at the second one, during the second request, the first was kept.
    assert (pool["worker"], pool["used_share"]["mean"], pool["running"]["max"]) == ("decode-0", 0.5, 2)
    assert result["samples"][0]["workers"][0]["used_blocks"] == 32


def test_a_trace_is_replayed_with_its_lengths(router: ScriptedRouter, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n0,9,3\n1,30,4\n2,5,5\n")
    status, result = bench(tmp_path, f"--trace={trace}", "--trace-speed=10", "--json-arrivals")
    assert status == 0
    requests = result["requests"]
    assert [(request["input_tokens"], request["output_tokens"]) for request in requests] == [(9, 3), (30, 4), (5, 5)]
    assert [request["scheduled_s"] for request in requests] == [0.0, 0.1, 0.2]
    assert [request["tokens"] for request in requests] == [[2, 1], [2, 1, 1], [2, 1, 1, 1]]


def test_the_search_ends_where_requests_are_no_longer_good(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        if request.cache_salt not in runs:
            runs.append(request.cache_salt)
        if runs.index(request.cache_salt) >= 2:
            raise errors.Overloaded("full", retry_after_s=1)
        yield from answer(request)

    router.script = script
    flags = ("--find-goodput", "--slo-ttft-ms=30000", "--rate=100", "--requests=40", "--goodput-tolerance=1")
    status, result = bench(tmp_path, *flags)
    assert status == 0
    assert [(probe["rate"], probe["well"]) for probe in result["probes"]] == [(100, True), (200, True), (400, False)]
    assert result["goodput_rate"] == 200
    assert "goodput: 200 requests/s" in capsys.readouterr().out
    prompts = [tuple(request.tokens.ids) for request in router.requests]
    assert len(set(prompts)) == len(prompts), "no run sends a prompt of another"


async def test_a_run_whose_verdict_is_clear_is_given_up_and_its_requests_end(router: ScriptedRouter) -> None:
    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        if len(router.requests) == 8:
            raise errors.Overloaded("full", retry_after_s=1)
        while not router.cancelled.wait(0.01):
            yield router_pb2.GenerateResponse()  # keeps the stream open, without a token

    router.script = script
    config = BenchConfig(router=router.address, rate=1000.0, requests=8, input_len=4, slo_ttft_ms=1.0, warmup=0)
    result = await measure(config, lambda progress, expected: None, give_up=True)
    assert result.stopped
    assert result.summary.errors == {"STOPPED": 7, "OVERLOADED": 1}


class Interruptible:
    """`paceline bench` as a process; its first requests are answered, the later ones never end."""

    def __init__(self, router: ScriptedRouter, *flags: str, answered: int, tokens: bool = True) -> None:
        self._under_way = threading.Event()

        def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
            if len(router.requests) <= answered:
                yield from answer(request)
                return
            while not router.cancelled.wait(0.01):
                yield router_pb2.GenerateResponse(token_ids=[1] if tokens else [])
                if tokens or len(router.requests) == 2:
                    self._under_way.set()

        router.script = script
        command = [sys.executable, "-m", "paceline.cli", "bench", "--output-len=6", "--warmup=0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def interrupt(self) -> tuple[int, str, str]:
        """Ctrl-C once requests are under way that do not end: status, output, errors."""
        assert self._under_way.wait(30)
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=30)  # and nobody else holds the pipes
        return self.process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_ends_the_generators_and_their_requests_and_shows_the_figures_so_far(
    router: ScriptedRouter, tmp_path: Path, processes: int
) -> None:
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    flags = ("--concurrency=2", f"--processes={processes}", f"--json={file}", f"--plots={plots}", "--slo-ttft-ms=30000")
    status, out, err = Interruptible(router, *flags, answered=4).interrupt()
    assert (status, err) == (130, "")
    assert "interrupted: the figures so far" in out
    assert "4 answered, 0 failed, 2 under way at the stop" in out
    assert "STOPPED" not in out
    result = json.loads(file.read_text())
    assert (result["interrupted"], result["stopped"]) == (True, True)
    summary = result["summary"]
    assert (summary["succeeded"], summary["stopped"], summary["goodput"]["share"]) == (4, 2, 1.0)
    stopped = [request for request in result["requests"] if request["error"] == "STOPPED"]
    assert sum(request["output_tokens"] for request in stopped) > 0, "what had come by then counts"
    assert (plots / "throughput.png").exists()
    assert router.cancelled.wait(30)


def test_a_run_without_an_answer_shows_no_latencies(router: ScriptedRouter) -> None:
    status, out, err = Interruptible(router, "--concurrency=2", answered=0, tokens=False).interrupt()
    assert (status, err) == (130, "")
    assert "interrupted: the figures so far" in out
    assert "0 answered, 0 failed, 2 under way at the stop" in out
    assert "p50" not in out


def test_ctrl_c_in_a_search_tells_what_was_found_so_far(router: ScriptedRouter, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    flags = ("--find-goodput", "--slo-ttft-ms=30000", "--rate=100", "--requests=10", f"--json={file}")
    status, out, err = Interruptible(router, *flags, answered=20).interrupt()
    assert status == 130, err
    assert "goodput: 200 requests/s, as far as the search came" in out
    record = json.loads(file.read_text())
    assert (record["interrupted"], record["goodput_rate"], len(record["probes"])) == (True, 200, 2)


def test_ctrl_c_before_the_first_request_has_nothing_to_show(router: ScriptedRouter) -> None:
    warming = Interruptible(router, "--concurrency=1", "--warmup=1", answered=0)
    status, out, err = warming.interrupt()
    assert (status, out, err) == (130, "", "")


def children() -> list[int]:
    """Process ids of this process's children."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def command(pid: int) -> bytes:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_loss_of_a_generator_is_said(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        [generator] = [pid for pid in children() if b"paceline.loadtest.generator" in command(pid)]
        os.kill(generator, signal.SIGKILL)
        yield from answer(request)

    router.script = script
    assert main(["bench", "--concurrency=1", "--warmup=0"]) == 1
    assert "error: a generator process ended with status -9" in capsys.readouterr().err


def test_another_server_is_measured_by_the_same_clock(tmp_path: Path) -> None:
    with openai_server() as server:
        status, result = bench(
            tmp_path, f"--openai={server.url}", "--vocab-size=50", "--concurrency=4", "--requests=12"
        )
    assert status == 0
    assert result["target"]["model"] == "served"
    assert (result["summary"]["succeeded"], result["summary"]["output_tokens"]) == (12, 72)
    assert (result["summary"]["handovers"], result["pools"]) == (None, [])
    assert all(0 <= token < 50 for request in server.requests for token in request["prompt"])


def test_loading_a_router_imports_nothing_that_only_workers_need(router: ScriptedRouter) -> None:
    script = (
        "import sys; from paceline.cli import main; assert main(['bench', '--rate=100', '--requests=2']) == 0; "
        "unneeded = ('torch', 'numpy', 'nixl', 'zmq', 'aiohttp', 'matplotlib'); "
        "print([name for name in sys.modules if name in unneeded or 'paceline.services.' in name])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.endswith("\n[]\n")


def test_plots_are_drawn(router: ScriptedRouter, tmp_path: Path) -> None:
    status, _ = bench(tmp_path, "--concurrency=2", "--requests=6", f"--plots={tmp_path / 'plots'}", "--sample-s=0.05")
    assert status == 0
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert {"ttft", "itl", "throughput", "timeline"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


def test_each_axis_of_a_plot_says_what_it_shows_and_in_which_unit(router: ScriptedRouter) -> None:
    config = BenchConfig(router=router.address, concurrency=2, requests=6, input_len=4, output_len=6, sample_s=0.05)
    drawn = figures(asyncio.run(measure(config, lambda progress, expected: None)))
    assert {"ttft", "itl", "throughput", "timeline"} <= drawn.keys()
    labels = [(axes.get_ylabel(), axes.get_xlabel()) for figure in drawn.values() for axes in figure.axes]
    units = re.compile(r"\((ms|s|tokens/s|requests|number in order.*|.*0 to 1)\)$")
    for y_label, x_label in labels:
        assert units.search(y_label), y_label
        assert units.search(x_label) or y_label == "requests under way (requests)", "which shares the other's"


def test_a_server_that_falls_behind_the_offered_rate_is_told_of(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_at_a_time = threading.Lock()

    def script(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        if router.requests.index(request) < 10:
            yield from answer(request)
            return
        with one_at_a_time:
            time.sleep(0.05)
            yield from answer(request)

    router.script = script
    _, result = bench(tmp_path, "--rate=100", "--requests=120", "--warmup=0")
    assert any("the server falls behind" in warning for warning in result["warnings"])
    assert "warning: the server falls behind" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("package", "flags", "flag"),
    [
        ("matplotlib.figure", ["--plots=x"], "--plots"),
        ("aiohttp", ["--openai=http://127.0.0.1:1/v1", "--vocab-size=9"], "--openai"),
    ],
)
def test_a_missing_package_is_named_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, flags: list[str], flag: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["bench", "--rate=1", *flags]) == 2
    name = package.partition(".")[0]
    assert f"error: {flag} needs the package {name}: install paceline[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--rate=1", "--router=127.0.0.1:1"], 1, "127.0.0.1:1: connection refused; is a router running there?"),
        (["--rate=1", "--input-len=2000", "--output-len=49"], 2, "exceed the model's context of 2048"),
        (["--rate=0"], 2, "rate: '0' (from --rate) is not accepted"),
        (
            ["--rate=1", "--concurrency=1"],
            2,
            "exactly one of rate, concurrency and trace must be given, and rate and concurrency are\n",
        ),
        (["--rate=1", "--model=nosuch"], 2, "serves 'tiny', and not 'nosuch'"),
    ],
)
def test_what_cannot_be_run_is_said(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, said: str
) -> None:
    assert main(["bench", *flags]) == status
    assert said in capsys.readouterr().err
    assert router.requests == []


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("json", "file/result.json"),
        ("json", "folder"),
        ("json", "/proc/result.json"),
        ("plots", "file"),
        ("plots", "file/plots"),
        ("plots", "/proc"),
        ("plots", "/proc/plots"),
    ],
)
def test_a_result_that_could_not_be_kept_is_said_before_the_load(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    assert main(["bench", "--rate=1", f"--router={router.address}", f"--{setting}={path}"]) == 2
    assert f"{setting}: {path} cannot be written" in capsys.readouterr().err
    assert router.requests == []


def test_the_look_whether_a_result_could_be_kept_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    check_json(old)
    check_json(tmp_path / "new" / "result.json")
    check_plots(tmp_path / "plots")
    assert old.read_text() == "kept"
    assert not list((tmp_path / "new").iterdir())
    assert not list((tmp_path / "plots").iterdir())
