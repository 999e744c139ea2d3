"""The parser of all subcommands, and how a command ends: its exit status and what it says of an error.

0 is success; 1 a failure at run time; 2 something for the caller to change (a flag, a request, a setting, a model);
130 Ctrl-C; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.cli import INTERRUPTED, ask, look, models, roles, up
from paceline.cli.flags import Parser
from paceline.cli.output import explain, print_error
from paceline.config import SECTIONS, add_flags, parse_address
from paceline.errors import InvalidRequest, PacelineError, StartupError
from paceline.loadtest.config import BenchConfig

BROKEN_PIPE: Final = 141
DEFAULT_ROUTER: Final = "127.0.0.1:7070"

_ROLE_HELP: Final = {
    "router": "run a router: what clients talk to and workers register with",
    "prefill": "run a prefill worker: computes prompts",
    "decode": "run a decode worker: generates tokens",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status. argparse itself ends the process for a wrong flag, with 2."""
    try:
        arguments = parser().parse_args(argv)
        status: int = arguments.handler(arguments)
        sys.stdout.flush()
    except PacelineError as error:
        print_error(explain(error))
        return 2 if isinstance(error, StartupError | InvalidRequest) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def parser() -> argparse.ArgumentParser:
    """All subcommands. The parsed namespace has a `handler`, which takes it and returns an exit status."""
    root = Parser(prog="paceline", description="Disaggregated LLM serving.")
    root.add_argument("--version", action="version", version=look.VERSION)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    for role, text in _ROLE_HELP.items():
        _add_role(commands, role, text)
    _add_generate(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_health(commands)
    _add_models(commands)
    _add_bench(commands)
    command = _command(commands, "version", "print the version")
    command.set_defaults(handler=look.version)
    return root


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: _Commands[Parser], name: str, text: str) -> Parser:
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")


def _add_config(command: argparse.ArgumentParser, role: str) -> None:
    command.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML file with settings")
    add_flags(command, SECTIONS[role])


def _add_up(commands: _Commands[Parser]) -> None:
    command = _command(commands, "up", "start a router, prefill and decode workers on this machine")
    command.add_argument("--log-dir", type=Path, default=None, metavar="DIR", help="also keep each role's log here")
    _add_config(command, "up")
    command.set_defaults(handler=up.run)


def _add_role(commands: _Commands[Parser], role: str, text: str) -> None:
    command = _command(commands, role, text)
    _add_config(command, role)
    # For supervisors: the kernel kills this process when its parent, PID, dies.
    command.add_argument("--die-with-parent", type=int, default=None, metavar="PID", help=argparse.SUPPRESS)
    command.set_defaults(handler=roles.run)


def _named_router() -> str:
    # Workers may be given several.
    return os.environ.get("PACELINE_ROUTER", "").partition(",")[0].strip() or DEFAULT_ROUTER


def _add_router_address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--router",
        type=_router_address,
        default=_named_router(),
        metavar="HOST:PORT",
        help=f"router to talk to; $PACELINE_ROUTER, else {DEFAULT_ROUTER}",
    )


def _router_address(text: str) -> str:
    parse_address("router", text)
    return text


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e9:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")


def _server_address(text: str) -> str:
    parse_address("address", text)
    return text


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling", "what is left out takes the router's default")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="smallest set of tokens that reaches this probability")
    group.add_argument("--top-k", type=int, metavar="K", help="this many most likely tokens; 0 for all")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drops what is this much less likely than the likeliest"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="of tokens in prompt and output; 1 is none"
    )
    group.add_argument("--presence-penalty", type=float, metavar="X", help="of tokens in the output, -2 to 2")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same for each time, -2 to 2")
    group.add_argument(
        "--logit-bias", type=ask.biases, metavar="ID:X,ID:X", help="added to tokens' logits; -100 excludes"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="tokens before which nothing ends the answer")
    group.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--stop-token-ids", type=ask.token_ids, metavar="A,B", help="token ids that end the answer")
    group.add_argument("--n", type=int, metavar="N", help="choices, each an answer of its own")
    group.add_argument("--best-of", type=int, metavar="N", help="choices to generate, of which the --n best are shown")
    group.add_argument("--beam-width", type=int, metavar="K", help="search this many beams; the --n best are shown")
    group.add_argument(
        "--length-penalty", type=float, metavar="X", help="power of a beam's length that its score is divided by"
    )
    group.add_argument(
        "--early-stopping", action="store_true", default=None, help="end a search with its K-th finished beam"
    )
    group.add_argument("--logprobs", type=int, metavar="K", help="print each token's log-probability, and the K best")
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after an end-of-sequence token")


def _add_request(command: argparse.ArgumentParser) -> None:
    _add_router_address(command)
    command.add_argument("--model", default="", help="model that must be served")
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="for queue and work together")
    command.add_argument("--priority", type=int, metavar="N", help="higher goes first")
    command.add_argument("--stats", action="store_true", help="print timings and who served it, to stderr")
    _add_sampling(command)


def _add_generate(commands: _Commands[Parser]) -> None:
    command = _command(commands, "generate", "stream the continuation of a prompt")
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="text, or - to read it from standard input")
    prompt.add_argument("--tokens", type=ask.token_ids, metavar="1,2,3", help="prompt as token ids")
    command.add_argument("--print-tokens", action="store_true", help="print token ids instead of text")
    command.add_argument("--request-id", default="", metavar="ID", help="id to find the request by")
    _add_request(command)
    command.set_defaults(handler=ask.generate)


def _add_chat(commands: _Commands[Parser]) -> None:
    command = _command(commands, "chat", "talk to the model, turn by turn on a terminal")
    command.add_argument("prompt", nargs="?", metavar="MESSAGE", help="one message, or - for standard input")
    command.add_argument("--system", metavar="TEXT", help="system message")
    _add_request(command)
    command.set_defaults(handler=ask.chat)


def _add_status(commands: _Commands[Parser]) -> None:
    command = _command(commands, "status", "show workers, pools and queues")
    _add_router_address(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="refresh every second until Ctrl-C")
    form.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(handler=look.status)


def _add_health(commands: _Commands[Parser]) -> None:
    command = _command(commands, "health", "exit with 0 if the server is serving, else with 1")
    command.add_argument(
        "address",
        nargs="?",
        type=_server_address,
        default=_named_router(),
        metavar="HOST:PORT",
        help=f"server to ask; $PACELINE_ROUTER, else {DEFAULT_ROUTER}",
    )
    command.add_argument(
        "--service",
        default="",
        help="one gRPC service; all by default. paceline.liveness: whether the process is there",
    )
    command.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="wait so long at most until it serves; not at all by default"
    )
    command.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="of one question; 3 by default")
    command.set_defaults(handler=look.health)


def _add_models(commands: _Commands[Parser]) -> None:
    command = _command(commands, "models", "handle models")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = _command(actions, "fetch", "fetch a model into the cache ahead of time")
    fetch.add_argument("model", nargs="?", help="model to fetch; the default one by default")
    fetch.add_argument("--cache-dir", default=argparse.SUPPRESS, metavar="DIR", help="where fetched models are kept")
    fetch.set_defaults(handler=models.fetch)
    known = _command(actions, "list", "list the models that can be served by name: sizes, and where they are kept")
    known.add_argument("--cache-dir", default=argparse.SUPPRESS, metavar="DIR", help="where fetched models are kept")
    known.set_defaults(handler=models.list_known)


def _add_bench(commands: _Commands[Parser]) -> None:
    command = _command(commands, "bench", "load a router, or an OpenAI-compatible server, and measure it")
    command.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML file with settings")
    add_flags(command, BenchConfig)
    command.set_defaults(handler=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from paceline.cli import bench  # measuring takes much that no other command needs

    return bench.run(arguments)
