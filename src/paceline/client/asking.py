"""What a caller asks for, as the router's messages; InvalidRequest for what does not even fit into one.

The router has the say on every value. Here is refused only what a message cannot carry, in the router's words where it
would have some: the field, the value and the limit, or what is wanted instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from msgspec import structs

from paceline import wire
from paceline.client import types
from paceline.config import parse_address
from paceline.errors import ConfigError, InvalidRequest, quote
from paceline.protos import common_pb2, router_pb2
from paceline.types import SamplingParams

Prompt = str | Sequence[int]

_NEARNESS: Final = 0.6
_MOST_IDS: Final = 2**32
"""Token ids are 32 bits wide on the wire."""

_MOST: Final = {FieldDescriptor.CPPTYPE_INT32: 2**31 - 1, FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1}
"""The largest number of a field's type."""

_WANTED: Final[Mapping[object, str]] = {
    int | None: "a whole number",
    float | None: "a number",
    bool | None: "True or False",
    str | Sequence[str] | None: "a text or a list of texts",
    Sequence[int] | None: "a list of token ids",
    Mapping[int, float] | None: "a mapping from token ids to numbers",
}
_PARAMETERS: Final = {name: _WANTED[kind] for name, kind in get_type_hints(types.Sampling).items()}
"""Each sampling parameter, and what it is."""


def checked_address(address: str) -> str:
    """The address. Raises InvalidRequest where it is not host:port."""
    try:
        parse_address("address", _text("address", address))
    except ConfigError as error:
        raise InvalidRequest("address", error.message.removeprefix("address: ")) from error
    return address


def check_timeout(timeout: float) -> None:
    """Raises InvalidRequest for a number of seconds that is no time to wait."""
    if not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
        raise InvalidRequest("timeout", f"{_shown(timeout)} is not a positive number of seconds")


def check_messages(messages: object) -> None:
    """Raises InvalidRequest for what is no list of Messages: a text, or dictionaries, say."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", f"{quote(messages)} is not a list of Messages: Message(role, content)")
    for index, turn in enumerate(messages):
        if not isinstance(turn, types.Message):
            raise InvalidRequest("messages", f"{quote(turn)} at index {index} is not a Message(role, content)")


def generate_request(
    prompt: Prompt | Sequence[types.Message],
    *,
    sampling: types.Sampling,
    request_id: str,
    timeout: float | None,
    model: str,
    priority: int | None,
    cache_salt: str = "",
) -> router_pb2.GenerateRequest:
    """The message for one generation."""
    request = router_pb2.GenerateRequest(
        request_id=_text("request_id", request_id),
        model=_text("model", model),
        sampling=_sampling(sampling),
        cache_salt=_text("cache_salt", cache_salt),
    )
    _set_prompt(request, prompt)
    if timeout is not None:
        check_timeout(timeout)
        request.timeout.CopyFrom(wire.duration(timeout))
    if priority is not None:
        try:
            request.priority = priority
        except (TypeError, ValueError) as error:
            raise InvalidRequest("priority", f"{quote(priority)} is not a whole number of 32 bits") from error
    return request


def abort_request(request_id: str) -> router_pb2.RouterAbortRequest:
    """The message that ends a request."""
    return router_pb2.RouterAbortRequest(request_id=_text("request_id", request_id))


def health_request(service: str) -> Any:
    """The message that asks for the health of one service, or of the whole server for an empty name."""
    return health_pb2.HealthCheckRequest(service=_text("service", service))


def _set_prompt(request: router_pb2.GenerateRequest, prompt: Prompt | Sequence[types.Message]) -> None:
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest("prompt", f"{quote(prompt)} is not a text, a list of token ids, or one of Messages")
    elif prompt and all(isinstance(turn, types.Message) for turn in prompt):
        turns = [turn for turn in prompt if isinstance(turn, types.Message)]
        request.chat.messages.extend(
            router_pb2.ChatMessage(
                role=_text(f"role of message {index}", turn.role),
                content=_text(f"content of message {index}", turn.content),
            )
            for index, turn in enumerate(turns)
        )
    else:
        # An empty list travels as an empty prompt, so that the router has the one say on it.
        request.tokens.SetInParent()
        try:
            # At once: one by one, long prompts hold an event loop up for milliseconds.
            request.tokens.ids.extend(cast(Sequence[int], prompt))
        except (TypeError, ValueError) as error:
            raise _wrong_token_id(prompt) from error


def _wrong_token_id(prompt: Sequence[object]) -> InvalidRequest:
    for index, token_id in enumerate(prompt):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < _MOST_IDS:
            return InvalidRequest("prompt", f"id {quote(token_id)} at index {index} is not a token id")
    return InvalidRequest("prompt", f"{quote(prompt)} is not a list of token ids")


def _text(field: str, text: str) -> str:
    """The text. Raises InvalidRequest for none, and for halves of characters, as bytes that are not UTF-8 become."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"{quote(text)} is not a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not UTF-8 at character {error.start}") from error
    return text


def _sampling(sampling: types.Sampling) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    for name, value in sampling.items():
        if name not in _PARAMETERS:
            raise InvalidRequest(name, _unknown(name))
        if value is None:
            continue
        field: dict[str, Any] = {name: _texts(value) if name == "stop" else value}
        try:
            message.MergeFrom(common_pb2.SamplingParams(**field))
        except (TypeError, ValueError, OverflowError) as error:
            raise _refusal(name, value, sampling) from error
    return message


def _texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, Sequence):
        for text in texts:
            if isinstance(text, str):
                _text("stop", text)
    return texts


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _PARAMETERS, 1, _NEARNESS)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_PARAMETERS)}"
    return f"is no sampling parameter; {hint}"


def _refusal(name: str, value: object, sampling: types.Sampling) -> InvalidRequest:
    """What is wrong with a value that its field cannot carry: of a number what the router would say."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or _PARAMETERS[name] != _WANTED[int | None]:
        return InvalidRequest(name, f"{quote(value)} is not {_PARAMETERS[name]}")
    defaults = SamplingParams()
    # What bounds others is taken along.
    given = {field: bound for field in ("n", "max_tokens") if isinstance(bound := sampling.get(field), int)}
    try:
        structs.replace(defaults, **{**given, name: value}).validated(vocab_size=_MOST_IDS)
    except InvalidRequest as error:
        return error
    most = _MOST[common_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].cpp_type]
    return InvalidRequest(name, f"{value} is over the limit of {most}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else quote(value)
