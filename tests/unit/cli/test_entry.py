"""Commands as a shell runs them: exit status, output and errors, against a router whose answers are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from rich.console import Console

from paceline import __version__, errors
from paceline.checkpoint.packaged import DEFAULT_MODEL
from paceline.cli import main
from paceline.cli.entry import DEFAULT_ROUTER, parser
from paceline.cli.look import look, render
from paceline.cli.output import counted
from paceline.cli.plan import free_ports
from paceline.protos import common_pb2, router_pb2
from paceline.testing.scripted_router import ScriptedRouter, scripted_router, worker

WAIT_S = 20.0


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRouter]:
    with scripted_router() as running:
        monkeypatch.setenv("PACELINE_ROUTER", running.address)
        yield running


def start(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "paceline.cli", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def endless(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
    while True:
        yield router_pb2.GenerateResponse(request_id="endless", text="x" * 8192, token_ids=[1])
        time.sleep(0.01)


def test_generate_streams_text_to_standard_output(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b", "--timeout", "9", "--seed", "3"]
    assert main(["generate", "Hi there", *options]) == 0
    assert capsys.readouterr() == ("Hello world\n", "")
    request = router.requests[0]
    assert (request.text, request.timeout.seconds) == ("Hi there", 9)
    assert (request.sampling.max_tokens, request.sampling.seed, list(request.sampling.stop)) == (5, 3, ["a", "b"])
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_stats_say_where_the_time_went_and_who_served(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.loads.workers.append(worker("decode-0", common_pb2.ROLE_DECODE, address=router.address))
    assert main(["generate", "Hi", "--stats"]) == 0
    shown = capsys.readouterr().err
    for part in ("3 tokens, 1 of them cached", "250 ms", "2 blocks, 4.0 KiB", "decode-0@9", "pids 11 and 12", "stop"):
        assert part in shown
    assert "prefill-0@7 (gone)" in shown


def test_generate_takes_token_ids_and_prints_them(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tokens", "1,2, 3", "--print-tokens"]) == 0
    assert list(router.requests[0].tokens.ids) == [1, 2, 3]
    assert capsys.readouterr().out == "100 101 \n"


def test_an_answer_without_text_is_shown_as_ids(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    finish = router_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH)
    router.script = lambda request: iter([router_pb2.GenerateResponse(token_ids=[7, 8], finish=finish)])
    assert main(["generate", "--tokens", "1"]) == 0
    assert capsys.readouterr().out == "7 8\n"


def test_a_dash_reads_the_prompt_from_standard_input(router: ScriptedRouter) -> None:
    process = start("generate", "-", stdin=subprocess.PIPE)
    out, err = process.communicate("Ça va\n".encode(), timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, b"Hello world\n", b"")
    assert router.requests[0].text == "Ça va\n"


def test_standard_input_that_is_no_text_is_refused(router: ScriptedRouter) -> None:
    process = start("generate", "-", stdin=subprocess.PIPE)
    _, err = process.communicate(b"\xff\xfe", timeout=WAIT_S)
    assert process.returncode == 2
    assert b"standard input is not UTF-8" in err
    assert router.requests == []


def test_chat_sends_a_conversation(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hi", "--system", "Be brief."]) == 0
    turns = [(turn.role, turn.content) for turn in router.requests[0].chat.messages]
    assert turns == [("system", "Be brief."), ("user", "Hi")]
    assert capsys.readouterr().out == "Hello world\n"


def test_chat_refuses_to_say_nothing(router: ScriptedRouter) -> None:
    process = start("chat")
    assert process.communicate(timeout=WAIT_S) == (b"", b"error: message: it is empty\n")
    assert process.returncode == 2
    assert router.requests == []


def converse(typed: bytes) -> tuple[int, str]:
    """`paceline chat` on a terminal: its exit status, and what the terminal showed."""
    master, slave = pty.openpty()
    command = [sys.executable, "-P", "-m", "paceline.cli", "chat"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    os.write(master, typed)
    shown = b""
    with contextlib.suppress(OSError):  # a pseudo-terminal's way of saying end
        while data := os.read(master, 65536):
            shown += data
    os.close(master)
    return process.wait(WAIT_S), shown.decode()


def test_chat_on_a_terminal_does_not_send_commands_to_the_model(router: ScriptedRouter) -> None:
    status, shown = converse(b"/help\n/clear all\n/etc/hosts has what?\n/exit\n")
    assert status == 0
    assert "/clear is no command: /reset starts over, /exit or Ctrl-D leaves" in shown
    assert shown.count("/reset starts over") == 3, "at the start too"
    assert [request.chat.messages[-1].content for request in router.requests] == ["/etc/hosts has what?"]


def test_chat_with_a_model_that_has_no_chat_is_refused_before_anything_is_typed(router: ScriptedRouter) -> None:
    router.has_chat_template = False
    status, shown = converse(b"")
    assert status == 2
    assert "error: chat: tiny has no chat template: it completes texts, by paceline generate" in shown
    assert ">" not in shown


def test_chat_on_a_terminal_remembers_the_turns_until_it_is_reset(router: ScriptedRouter) -> None:
    status, _ = converse(b"Hi\nAnd now?\n/reset\nAgain\n/exit\n")
    assert status == 0
    asked = [[turn.content for turn in request.chat.messages] for request in router.requests]
    assert asked == [["Hi"], ["Hi", "Hello world", "And now?"], ["Again"]]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.PromptTooLong("prompt", "9000 tokens are over the context of 2048"), 2),
        (errors.Overloaded("512 requests wait", retry_after_s=1.0), 1),
        (errors.WorkerLost("decode-0 died"), 1),
    ],
)
def test_an_error_is_one_line_on_standard_error(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str], error: errors.PacelineError, status: int
) -> None:
    def fail(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        raise error
        yield

    router.script = fail
    assert main(["generate", "Hi"]) == status
    assert capsys.readouterr() == ("", f"error: {error.message}\n")


@pytest.mark.parametrize("text", ["Once", "Once\n"])
def test_an_error_amid_an_answer_starts_on_a_new_line(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    def break_off(request: router_pb2.GenerateRequest) -> Iterator[router_pb2.GenerateResponse]:
        yield router_pb2.GenerateResponse(text=text, token_ids=[1])
        yield router_pb2.GenerateResponse(token_ids=[2])
        raise errors.WorkerLost("decode-0 died")

    router.script = break_off
    assert main(["generate", "Hi"]) == 1
    assert capsys.readouterr() == ("Once\n", "error: decode-0 died\n")


def test_a_router_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--router", "127.0.0.1:1"]) == 1
    said = "error: no answer from 127.0.0.1:1: connection refused; is a router running there? (paceline up)\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "nonsense", ""])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    said = f"{address!r} is not host:port with a port from 1 to 65535\n"
    assert main(["generate", "Hi", "--router", address]) == 2
    assert capsys.readouterr().err == f"error: router: {said}"
    assert main(["health", address]) == 2
    assert capsys.readouterr().err == f"error: address: {said}"
    if address:
        monkeypatch.setenv("PACELINE_ROUTER", address)
        assert main(["status"]) == 2
        assert capsys.readouterr().err == f"error: router: {said}"


def test_an_empty_router_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ROUTER", "")
    assert parser().parse_args(["status"]).router == DEFAULT_ROUTER
    assert parser().parse_args(["health"]).address == DEFAULT_ROUTER


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["--frobnicate"], "required: COMMAND (see paceline --help)"),
        (["generate", "Hi", "--frobnicate"], "unrecognized arguments: --frobnicate (see paceline generate --help)"),
        (["generate", "Hi", "there"], "unrecognized arguments: there (see paceline generate --help)"),
        (
            ["generate", "Hi", "--tempreature=0", "-x"],
            "unrecognized arguments: --tempreature=0 -x; did you mean --temperature? (see paceline generate --help)",
        ),
        (["models", "list", "--all"], "unrecognized arguments: --all (see paceline models list --help)"),
        (["up", "--pool-bloks=3"], "did you mean --pool-blocks? (see paceline up --help)"),
        (["generate"], "one of the arguments PROMPT --tokens is required"),
        (["generate", "Hi", "--tokens", "1"], "not allowed with"),
        (["generate", "--tokens", "1,x"], "'1,x' is not a list of token ids"),
        (["generate", "Hi", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["health", "--timeout", "soon"], "invalid float value: 'soon'"),
        (["health", "--wait", "0"], "'0' is not a positive number of seconds"),
        (["health", "--wait", "soon"], "'soon' is not a positive number of seconds"),
        (["status", "--watch", "--json"], "not allowed with"),
    ],
)
def test_a_wrong_command_line_is_explained_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--prefill", "-1"], "prefill"),
        (["up", "--decode", "0"], "decode"),
        (["up", "--config", "/does/not/exist"], "/does/not/exist"),
        (["up", "--model", "no-such-model", "--port", "0"], "no-such-model"),
        (["up", "--model", "dummy:tiny", "--port", "7080", "--prefill-port", "7080"], "7080 is asked for twice"),
        (["router", "--lease-s", "1"], "lease_s"),
        (["decode", "--pool-blocks", "zero"], "pool_blocks"),
        (["prefill", "--router", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_setting_is_one_line_with_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path / "run"))
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert said in shown


def test_ctrl_c_ends_an_answer_with_130_and_cancels_it(router: ScriptedRouter) -> None:
    router.script = endless
    process = start("generate", "Hi")
    assert process.stdout is not None
    process.stdout.read(8192)
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=process.communicate)
    drain.start()
    assert process.wait(WAIT_S) == 130
    drain.join(WAIT_S)
    assert router.cancelled.wait(WAIT_S)


def test_ctrl_c_amid_the_imports_is_130_without_a_word() -> None:
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': os.kill(os.getpid(), signal.SIGINT)\n"
        "from paceline.cli import main\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.exit(main(['version']))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


def test_a_reader_that_goes_away_ends_the_command_quietly(router: ScriptedRouter) -> None:
    router.script = endless
    process = start("generate", "Hi")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(8192)
    process.stdout.close()
    assert process.wait(WAIT_S) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert router.cancelled.wait(WAIT_S)


def test_status_is_a_table_with_every_worker(router: ScriptedRouter) -> None:
    router.loads.queued = 3
    router.loads.workers.append(worker("prefill-0", common_pb2.ROLE_PREFILL))
    router.loads.workers.append(worker("decode-0", common_pb2.ROLE_DECODE, address=router.address))
    process = start("status")
    out = process.communicate(timeout=WAIT_S)[0].decode()
    assert process.returncode == 0
    assert "3 queued" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert rows["prefill-0"] == [
        "prefill-0",
        "prefill",
        "127.0.0.1:1",
        "…000009",
        "?",
        "2",
        "1",
        "32/64",
        "40",
        "0",
        "0.3",
        "s",
    ]
    assert rows["decode-0"][4] == "11+12"


@pytest.mark.parametrize("name", ["decode-0", "left"])
def test_status_keeps_names_and_addresses_whole_in_80_columns(router: ScriptedRouter, name: str) -> None:
    router.loads.workers.append(worker(name, common_pb2.ROLE_DECODE, address="127.0.0.1:54321"))
    router.loads.workers[0].draining = True
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(asyncio.run(look(router.address)), 80))
    *_, header, row = captured.get().splitlines()
    role = ["role"] if name == "left" else []
    assert header.split() == ["worker", *role, "address", "run", "wait", "used", "commit", "quar", "heard"]
    assert row.startswith(f"{name} (draining)")
    assert "127.0.0.1:54321" in row
    assert row.endswith("0.3 s ")
    assert "…" not in row


def test_status_as_json_holds_the_same(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.loads.workers.append(worker("decode-0", common_pb2.ROLE_DECODE, address=router.address))
    assert main(["status", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["loads"]["workers"][0]["load"]["free_blocks"] == 32
    assert seen["processes"] == {"decode-0@9": [11, 12]}


def test_status_says_how_many_workers_of_each_tier_suit_the_requests(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.loads.balance.CopyFrom(router_pb2.Balance(prefill_tokens_per_second=43_100, prefill_per_decode=2.43))
    assert main(["status"]) == 0
    assert "2.4 prefill workers to a decode worker. One computes 43,100" in capsys.readouterr().out.replace("\n", " ")


def test_status_says_why_no_request_can_be_placed(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.loads.workers.append(worker("prefill-0", common_pb2.ROLE_PREFILL))
    router.loads.obstacle = "no decode worker is registered"
    assert main(["status"]) == 0
    assert "no request can be placed: no decode worker is registered" in capsys.readouterr().out


def test_status_without_workers_says_so(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "no worker is registered" in capsys.readouterr().out


def test_health_is_its_exit_status(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", router.address]) == 0
    router.health.enter_graceful_shutdown()
    assert main(["health", router.address]) == 1
    assert main(["health", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == "serving\nnot serving\n"


def test_health_says_what_a_router_lacks(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.loads.obstacle = "no decode worker is registered"
    router.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main(["health", router.address]) == 1
    assert capsys.readouterr().out == "not serving: no decode worker is registered\n"
    assert main(["health", router.address, "--wait", "0.3"]) == 1
    assert capsys.readouterr().out == "not serving: no decode worker is registered\n"


def test_health_waits_for_a_server_that_is_not_there_yet(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(main, ["health", f"127.0.0.1:{port}", "--wait", "60"])
        time.sleep(0.5)
        assert not waiting.done()
        with scripted_router(port) as router:
            router.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            time.sleep(0.5)
            assert not waiting.done()
            router.health.set("", health_pb2.HealthCheckResponse.SERVING)
            assert waiting.result(30) == 0
    assert capsys.readouterr().out == "serving\n"


def test_health_waits_no_longer_than_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "127.0.0.1:1", "--wait", "0.3"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_health_of_an_unknown_service_or_in_no_time_is_refused(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", router.address, "--service", "tea"]) == 2
    assert capsys.readouterr().err == f"error: service: 'tea' is none of the server at {router.address}\n"
    assert main(["health", router.address, "--timeout", "0"]) == 2
    assert capsys.readouterr().err == "error: timeout: 0 is not a positive number of seconds\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"paceline {__version__} ")


def test_one_is_no_plural() -> None:
    assert [counted(count, "block") for count in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]


def test_version_is_a_flag_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"paceline {__version__} ")


def test_models_fetch_names_a_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "dummy:tiny"]) == 0
    assert capsys.readouterr().out == "dummy:tiny is built in\n"


def test_models_list_shows_names_sizes_and_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", f"--cache-dir={tmp_path}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["model", "size", "on", "disk", "kept", "in"]
    assert ["smollm2-135m-instruct", "93.8", "MiB", "not", "fetched"] in rows, "the same as once it is fetched"
    assert ["dummy:tiny", "-", "built", "in:", "random", "weights"] in rows


def test_a_fetched_model_is_listed_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a folder whose name is long enough to be cut off where tables are".replace(" ", "-") / "models"
    file = file / DEFAULT_MODEL.file_name
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(DEFAULT_MODEL.file_bytes)
    assert main(["models", "list", f"--cache-dir={file.parent.parent}"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if DEFAULT_MODEL.name in line)
    assert row.split() == [DEFAULT_MODEL.name, "93.8", "MiB", str(file)]


def test_logprobs_are_printed_with_the_tokens_texts(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    def logprob(
        token_id: int, value: float, text: str | None, *top: common_pb2.TokenLogprob
    ) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=value, text=text, top=top)

    the, line = logprob(278, -0.25, " the"), logprob(13, -1.5, "\n")
    finish = router_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH)
    router.script = lambda request: iter(
        [
            router_pb2.GenerateResponse(
                text=" the", token_ids=[278], logprobs=[logprob(278, -0.25, " the", the, line)]
            ),
            router_pb2.GenerateResponse(token_ids=[7], token_index=1, logprobs=[logprob(7, -2.0, None)], finish=finish),
        ]
    )
    assert main(["generate", "Hi", "--logprobs", "2"]) == 0
    assert capsys.readouterr() == (
        " the\n",
        'choice 0  278 " the" -0.2500  [278 " the" -0.2500, 13 "\\n" -1.5000]\nchoice 0  7 -2.0000  []\n',
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["up", "--prefill=0", "--local-prefill=never"], "prefill: 0 and local_prefill: never contradict each other"),
        (["up", "--prefill-devices=cuda:0,nonsense"], "prefill_devices: 'nonsense' is no device; allowed are cpu, and"),
        (["up", "--decode-devices=cuda"], "decode_devices: 'cuda' is no device; allowed are cpu, and cuda:N for GPU N"),
        (
            ["up", "--decode-devices=cpu", "--cuda-index=0"],
            "decode_devices: cpu and cuda_index: 0 contradict each other",
        ),
        (["up", "--device=cpu", "--cuda-index=0"], "device: cpu and cuda_index: 0 contradict each other"),
        (["decode", "--device=cpu", "--cuda-index=0"], "device: cpu and cuda_index: 0 contradict each other"),
        (["prefill", "--device=cuda:x"], "device: 'cuda:x' is no device; allowed are cpu, and cuda:N for GPU N"),
    ],
)
def test_a_device_that_is_none_or_contradicts_another_is_refused_with_its_value(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(flags) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_talking_to_a_router_imports_neither_torch_nor_a_service(router: ScriptedRouter) -> None:
    script = (
        "import sys; from paceline.cli import main; assert main(['generate', 'Hi']) == 0; "
        "print([name for name in sys.modules if name in ('torch', 'numpy', 'nixl') or 'paceline.services.' in name])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.stdout == "Hello world\n[]\n"
