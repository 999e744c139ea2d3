"""`paceline generate` and `paceline chat`: one request, or a conversation, streamed to standard output."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Final, TypedDict

from paceline.cli.output import explain, print_error
from paceline.cli.stats import print_logprobs, print_stats
from paceline.client import Client, Completion, Message, Sampling, Stream
from paceline.client.convert import completion
from paceline.errors import EngineError, InvalidRequest, PacelineError
from paceline.types import FinishReason

_EXIT_WORDS: Final = frozenset({"/exit", "/quit", "/bye"})
_RESET_WORD: Final = "/reset"
_COMMANDS: Final = f"{_RESET_WORD} starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_COMMAND: Final = re.compile(r"/[A-Za-z]*(\s|$)")
"""A message that begins so is meant for this program; one such as `/etc/hosts?` is not."""


def token_ids(text: str) -> list[int]:
    """`1,2,3` as ids, for argparse."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from error


def biases(text: str) -> dict[int, float]:
    """`5:-100,7:1.5` as biases by id, for argparse."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of biases such as 5:-100,7:1.5") from error


def generate(arguments: argparse.Namespace) -> int:
    """Streams the continuation of a text or of token ids."""
    prompt = arguments.tokens if arguments.tokens is not None else _text(arguments.prompt)
    with Client(arguments.router) as client:
        stream = client.generate(prompt, request_id=arguments.request_id, **_options(arguments), **_sampling(arguments))
        answer = _show(stream, tokens=arguments.print_tokens)
        if arguments.stats:
            print_stats(client, answer)
    return 0 if answer.finish.reason in (FinishReason.STOP, FinishReason.LENGTH) else 1


def chat(arguments: argparse.Namespace) -> int:
    """One message and its answer, or turn by turn where no message is given and standard input is a terminal."""
    turns = [Message("system", arguments.system)] if arguments.system else []
    with Client(arguments.router) as client:
        if arguments.prompt is None and sys.stdin.isatty():
            return _converse(client, arguments, turns)
        said = _text("-" if arguments.prompt is None else arguments.prompt)
        if not said.strip():
            raise InvalidRequest("message", "it is empty")
        turns.append(Message("user", said))
        answer = _reply(client, arguments, turns)
        return 0 if answer.finish.reason in (FinishReason.STOP, FinishReason.LENGTH) else 1


def _converse(client: Client, arguments: argparse.Namespace, system: list[Message]) -> int:
    import readline  # noqa: F401 - importing it is what gives input() its line editing

    model = client.model_info()
    if not model.has_chat_template:  # each message would be refused
        raise InvalidRequest("chat", f"{model.model} has no chat template: it completes texts, by paceline generate")
    print(f"{model.model}. {_COMMANDS}.")
    turns = list(system)
    while True:
        try:
            said = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        if said in _EXIT_WORDS:
            return 0
        if said == _RESET_WORD:
            turns = list(system)
        elif _COMMAND.match(said):
            print(_COMMANDS if said == "/help" else f"{said.split()[0]} is no command: {_COMMANDS}")
        elif said:
            turns = _turn(client, arguments, [*turns, Message("user", said)])


def _turn(client: Client, arguments: argparse.Namespace, turns: list[Message]) -> list[Message]:
    """The conversation after the model's turn; without the user's last one where there was no answer."""
    try:
        answer = _reply(client, arguments, turns)
    except KeyboardInterrupt:
        print("[stopped]")
    except PacelineError as error:
        print_error(explain(error))
    else:
        return [*turns, Message("assistant", answer.text)]
    return turns[:-1]


def _reply(client: Client, arguments: argparse.Namespace, turns: list[Message]) -> Completion:
    answer = _show(client.chat(turns, **_options(arguments), **_sampling(arguments)), tokens=False)
    if arguments.stats:
        print_stats(client, answer)
    return answer


def _show(stream: Stream, *, tokens: bool) -> Completion:
    """Prints an answer as it comes, and further choices behind the first.

    One that is all ids and no text, from a model without a tokenizer, is printed as ids.
    """
    chunks = []
    last = ""
    try:
        with stream:
            for chunk in stream:
                chunks.append(chunk)
                if chunk.choice != 0:
                    continue
                text = "".join(f"{token_id} " for token_id in chunk.token_ids) if tokens else chunk.text
                sys.stdout.write(text)
                sys.stdout.flush()
                last = text or last
    except (PacelineError, KeyboardInterrupt):
        if last and not last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    if not chunks or chunks[-1].finish is None:
        raise EngineError("the router ended the answer without saying why")
    answer = completion(chunks)
    if not tokens and not answer.text:
        sys.stdout.write(" ".join(map(str, answer.token_ids)))
    sys.stdout.write("\n")
    for number, choice in enumerate(answer.choices[1:], start=1):
        ids = tokens or not choice.text
        sys.stdout.write(f"--- {number}\n{' '.join(map(str, choice.token_ids)) if ids else choice.text}\n")
    sys.stdout.flush()
    print_logprobs(answer)
    return answer


def _text(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is not UTF-8: {error}") from error


class _Options(TypedDict):
    timeout: float | None
    model: str
    priority: int | None


def _options(arguments: argparse.Namespace) -> _Options:
    return _Options(timeout=arguments.timeout, model=arguments.model, priority=arguments.priority)


def _sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=arguments.logit_bias,
        min_tokens=arguments.min_tokens,
        n=arguments.n,
        best_of=arguments.best_of,
        beam_width=arguments.beam_width,
        length_penalty=arguments.length_penalty,
        early_stopping=arguments.early_stopping,
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
        seed=arguments.seed,
        stop=arguments.stop,
        stop_token_ids=arguments.stop_token_ids,
        ignore_eos=arguments.ignore_eos,
    )
