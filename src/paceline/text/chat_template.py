"""Chat messages to the prompt's token ids, by the model's own Jinja template, in a sandbox.

Templates come with model files and messages from anyone: neither is trusted. Control tokens come from the template
alone, whatever a message says (see `paceline.text.user_text`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import CheckpointError, InvalidRequest, UnsupportedFeature, quote
from paceline.text.tokenizer import Tokenizer
from paceline.text.user_text import UserText, unused_mark

ROLES: Final = ("system", "user", "assistant", "tool", "developer")
"""The roles there are. Templates build control tokens from a role's name, so that free text must not be one."""

_FIELDS: Final = ("role", "content", "name", "tool_call_id")
_OUTPUT_BASE: Final = 2**20  # characters that a template may add
_OUTPUT_RATIO: Final = 8  # and how often it may repeat what it was given

Message = Mapping[str, object]


class ChatTemplate:
    """The template of one model; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, now: Callable[[], datetime.datetime] = datetime.datetime.now) -> None:
        """Compiles `tokenizer.chat_template`; `now` is what templates that print a date are told.

        Raises `CheckpointError` for a template that is no Jinja.
        """
        self._tokenizer = tokenizer
        self._template: jinja2.Template | None = None
        source = tokenizer.chat_template
        if source is None:
            return
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template does not compile: {error}") from error
        self._user_text = UserText(tokenizer.control_tokens, _literals(tree))
        self._source = source

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The prompt's ids.

        A message is an object with `role` (one of `ROLES`) and `content`, a string or a list of text parts; `name` and
        `tool_call_id` may be there. `add_generation_prompt` ends the prompt where the assistant's answer begins. Raises
        `InvalidRequest` for malformed messages, ones that the template refuses, and a model without a template.
        """
        if self._template is None:
            raise InvalidRequest("messages", "the model has no chat template: send a prompt instead")
        checked = _checked(messages)
        texts = [text for message in checked for text in message.values()]
        mark = unused_mark([*texts, self._source])
        marked = [
            {key: text if key == "role" else self._user_text.mark(text, mark) for key, text in message.items()}
            for message in checked
        ]
        limit = _OUTPUT_BASE + _OUTPUT_RATIO * sum(map(len, texts))
        rendered = self._render(self._template, marked, add_generation_prompt, limit)
        return self._tokenizer.encode(rendered, allow_special=True, add_bos=False, ignore=mark)

    def _render(
        self, template: jinja2.Template, messages: list[dict[str, str]], add_generation_prompt: bool, limit: int
    ) -> str:
        pieces, size = [], 0
        try:
            for piece in template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.named_tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise InvalidRequest("messages", f"the chat template makes more than {limit} characters of them")
        # A template is a program: on messages it was not written for it fails in any way that programs do.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {str(error)[:200]}") from error
        return "".join(pieces)


def _checked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages' fields as plain text, or `InvalidRequest` naming the first that is malformed."""
    if not messages:
        raise InvalidRequest("messages", "is empty, expected at least one message")
    return [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(where: str, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(where, f"is {quote(message)}, expected an object")
    for key in message:
        if key not in _FIELDS:
            raise UnsupportedFeature(f"{where}.{str(key)[:40]}", f"is not served, only {', '.join(_FIELDS)} are")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role", f"is {quote(role)}, expected one of {', '.join(ROLES)}")
    checked = {"role": str(role), "content": _content(f"{where}.content", message.get("content"))}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            checked[key] = _text(f"{where}.{key}", message[key])
    return checked


def _content(where: str, content: object) -> str:
    """One string; text parts are joined."""
    if not isinstance(content, list | tuple):
        return _text(where, content)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise UnsupportedFeature(f"{where}[{index}]", f"is {quote(part)}, and only parts of type text are served")
        texts.append(_text(f"{where}[{index}].text", part.get("text")))
    return "".join(texts)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(where, f"is {quote(value)}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(where, "has a lone surrogate, which is not valid Unicode") from error
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no operator makes a huge value out of small ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies numbers; repeating a string or a list, and powers, are refused."""
        if operator == "*" and all(isinstance(value, int | float) for value in (left, right)):
            return left * right
        raise jinja2.exceptions.SecurityError(f"the operator {operator} is for numbers, and powers are refused")


class _Generation(Extension):
    """The block `{% generation %}`, by which training code finds the assistant's words; it is plain text here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime.datetime]) -> jinja2.Environment:
    """What chat templates expect to find, as Hugging Face's library defines it."""

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def raise_exception(message: object) -> NoReturn:
        raise jinja2.TemplateRuntimeError(str(message))

    def strftime_now(layout: str) -> str:
        return now().strftime(layout)

    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _literals(tree: nodes.Template) -> set[str]:
    """The template's own texts: what it prints, and the strings in its expressions."""
    strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return strings | {node.data for node in tree.find_all(nodes.TemplateData)}
