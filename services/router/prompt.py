"""A client's request, validated into the router's own type: nothing behind this file sees an unvalidated one.

Tokenising runs on threads of its own, and what is plainly too long is refused before it: a million ids or megabytes of
text cost neither the event loop nor a thread more than a look at their length. Some thousand ids are read where they
are: a thread there and back costs the first token more. Long texts have a thread of their own, for short ones never to
wait behind seconds of work.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from paceline import wire
from paceline.errors import InvalidRequest, PromptTooLong, UnknownModel, quote
from paceline.protos import router_pb2
from paceline.text import ChatTemplate, Detokenizer, Tokenizer, check_stops
from paceline.types import Limits, RequestId, SamplingParams, check_prompt

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
MAX_STOP_IDS: Final = 1_024
MAX_SALT_CHARACTERS: Final = 128
MAX_SCORES: Final = 500_000
"""Most log-probabilities of a prompt: 7 MB on the wire, where a message has 16 MiB."""
_THREADS: Final = 2
_MOST_AT_ONCE: Final = 8_192
"""Ids of a prompt that are read on the event loop: under a millisecond's work."""
_LONG_CHARACTERS: Final = 65_536
"""From here on a text is long: tokenising it takes more than some 20 ms."""
_LONG_TURNS: Final = 1_024
"""From here on a chat is, whatever it says."""
_MAX_TIMEOUT_S: Final = 86_400.0


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """`keep` choices are answered of those that are generated."""

    keep: int
    show_logprobs: bool  # the client asked for them; the choice is by them in any case


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. `timeout_s` bounds queueing and generation together."""

    request_id: RequestId
    prompt: tuple[int, ...]
    encoded_prompt: wire.EncodedIds  # the same, as both workers are sent it
    sampling: SamplingParams
    stop: tuple[str, ...]
    best: Best | None = None  # where not all of the choices are for the client
    timeout_s: float
    priority: int
    cache_salt: str = ""

    @property
    def comes_at_once(self) -> bool:
        """True where no token is known to be in the answer before the last one is."""
        return self.best is not None or self.sampling.beam_width is not None


class PromptReader:
    """Reads requests for one model. Close it once."""

    def __init__(self, model: str, tokenizer: Tokenizer, chat: ChatTemplate | None, *, timeout_s: float) -> None:
        """`timeout_s` is used where a request has none."""
        self.model = model
        self.tokenizer = tokenizer
        self._chat = chat
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenise-long")
        longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        # A text has at least a token for so many characters. Normalising may make four of them one.
        self._most_characters = 4 * max(1, longest)

    @property
    def has_chat_template(self) -> bool:
        """True where chats are served."""
        return self._chat is not None

    def close(self) -> None:
        """Ends the threads."""
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def text_stream(self) -> Detokenizer:
        """A new answer's way from ids to text."""
        return Detokenizer(self.tokenizer)

    def token_text(self, token_id: int) -> str | None:
        """What a token stands for by itself, control tokens too; None for a model without a tokenizer."""
        return self.tokenizer.decode([token_id], skip_special=False) if self.tokenizer.has_text else None

    def timeout_s(self, message: router_pb2.GenerateRequest) -> float:
        """How long the request may take in all, in seconds. Raises InvalidRequest."""
        return read_timeout(message, default_s=self._timeout_s)

    async def read(self, message: router_pb2.GenerateRequest, *, request_id: RequestId, limits: Limits) -> Request:
        """The valid request, or the InvalidRequest that names its first fault."""
        if message.model and message.model != self.model:
            raise UnknownModel("model", f"{quote(message.model)} is not served here; {quote(self.model)} is")
        timeout_s = self.timeout_s(message)
        stop = tuple(message.sampling.stop)
        check_stops(stop)
        if len(message.sampling.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                "stop_token_ids", f"{len(message.sampling.stop_token_ids)} ids are over the limit of {MAX_STOP_IDS}"
            )
        sampling = wire.sampling_from_proto(message.sampling, seed=secrets.randbits(64))
        sampling = sampling.validated(vocab_size=limits.vocab_size)
        if stop and sampling.beam_width is not None:
            raise InvalidRequest(
                "stop", f"{quote(stop[0])} cannot be had with beam_width: beams have no text; stop_token_ids end them"
            )
        if message.WhichOneof("prompt") == "tokens" and len(message.tokens.ids) <= _MOST_AT_ONCE:
            prompt, encoded = self._read_prompt(message, sampling.max_tokens, limits)
        else:
            prompt, encoded = await asyncio.get_running_loop().run_in_executor(
                self._long if is_long(message) else self._threads,
                self._read_prompt,
                message,
                sampling.max_tokens,
                limits,
            )
        check_scores(sampling, len(prompt))
        best = None
        if sampling.best_of is not None and sampling.best_of > sampling.n:
            best = Best(keep=sampling.n, show_logprobs=sampling.logprobs is not None)
            sampling = msgspec.structs.replace(sampling, n=sampling.best_of, logprobs=sampling.logprobs or 0)
        sampling = msgspec.structs.replace(sampling, best_of=None)
        return Request(
            request_id=request_id,
            prompt=prompt,
            encoded_prompt=encoded,
            sampling=sampling,
            stop=stop,
            best=best,
            timeout_s=timeout_s,
            priority=message.priority,
            cache_salt=read_cache_salt(message.cache_salt),
        )

    def _read_prompt(
        self, message: router_pb2.GenerateRequest, max_tokens: int, limits: Limits
    ) -> tuple[tuple[int, ...], wire.EncodedIds]:
        """Runs on a thread, but for short lists of ids."""
        match message.WhichOneof("prompt"):
            case "tokens":
                self._refuse_long(len(message.tokens.ids), "tokens", max_tokens, limits)
                prompt = tuple(message.tokens.ids[:])  # a slice is a list, made at once
            case "text":
                self._refuse_long(len(message.text) // self._most_characters, "text", max_tokens, limits)
                prompt = tuple(self.tokenizer.encode(message.text))
            case "chat":
                prompt = self._read_chat(message.chat, max_tokens, limits)
            case _:
                raise InvalidRequest("prompt", "is missing: one of text, tokens and chat is needed")
        check_prompt(prompt, max_tokens=max_tokens, limits=limits)
        given = message.WhichOneof("prompt") == "tokens"
        return prompt, wire.EncodedIds(message.tokens if given else router_pb2.TokenIds(ids=prompt))

    def _read_chat(self, chat: router_pb2.Chat, max_tokens: int, limits: Limits) -> tuple[int, ...]:
        if self._chat is None:
            raise InvalidRequest("chat", f"{self.model} has no chat template: send text or token ids instead")
        length = sum(len(message.content) for message in chat.messages)
        self._refuse_long(max(length // self._most_characters, len(chat.messages)), "chat", max_tokens, limits)
        return tuple(self._chat.encode([{"role": turn.role, "content": turn.content} for turn in chat.messages]))

    def _refuse_long(self, least_tokens: int, field: str, max_tokens: int, limits: Limits) -> None:
        """Raises PromptTooLong for what must come to more tokens than the context, before any of it is looked at."""
        if least_tokens > limits.context_tokens:
            raise PromptTooLong(
                "prompt",
                f"{field} of at least {least_tokens} tokens + max_tokens {max_tokens} "
                f"is over the context of {limits.context_tokens} tokens",
            )


def is_long(message: router_pb2.GenerateRequest) -> bool:
    """True for a text or a chat that takes long to tokenise."""
    turns = message.chat.messages
    if len(turns) >= _LONG_TURNS:
        return True
    return len(message.text) + sum(len(turn.content) for turn in turns) >= _LONG_CHARACTERS


def check_scores(sampling: SamplingParams, prompt_tokens: int) -> None:
    """Raises InvalidRequest where the prompt's log-probabilities would not fit into a message."""
    if sampling.prompt_logprobs is None:
        return
    scores = prompt_tokens * (1 + sampling.prompt_logprobs)
    if scores > MAX_SCORES:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} of {prompt_tokens} prompt tokens are {scores} numbers, over the limit of "
            f"{MAX_SCORES}",
        )


def read_request_id(request_id: str, *, draw: Callable[[], str] = lambda: uuid.uuid4().hex) -> RequestId:
    """The id, or a new one where it is empty. Raises InvalidRequest for one that is long, or unfit for a log line."""
    if not request_id:
        return RequestId(draw())
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", f"{quote(request_id)} is not 1 to 128 letters, digits or any of . _ : @ / -")
    return RequestId(request_id)


def read_cache_salt(asked: str) -> str:
    """A salt that is short enough to be sent along with every call."""
    if len(asked) > MAX_SALT_CHARACTERS:
        raise InvalidRequest("cache_salt", f"{len(asked)} characters are over the limit of {MAX_SALT_CHARACTERS}")
    return asked


def read_timeout(message: router_pb2.GenerateRequest, *, default_s: float) -> float:
    """The request's timeout in seconds."""
    if not message.HasField("timeout"):
        return default_s
    timeout_s = wire.seconds(message.timeout)
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= _MAX_TIMEOUT_S):
        raise InvalidRequest("timeout", f"{timeout_s} s is not over 0 and at most {_MAX_TIMEOUT_S:.0f} s")
    return timeout_s


def own_limits(tokenizer: Tokenizer, *, context_tokens: int) -> Limits:
    """What the router itself enforces, before any decode worker says less. It has no pool: 32 bits is no bound."""
    return Limits(vocab_size=tokenizer.vocab_size, context_tokens=context_tokens, pool_blocks=2**32 - 1)
