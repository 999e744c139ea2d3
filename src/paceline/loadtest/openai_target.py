"""An OpenAI-compatible server as a target: `POST /completions`, streamed as server-sent events.

Answers have exact lengths through `ignore_eos` and `min_tokens`, which vLLM and SGLang know beyond OpenAI's own fields.
How many tokens a message brings is taken from its `token_ids`, where the server gives them (vLLM's `return_token_ids`).
Else each message counts as one until the closing `usage` tells the sum, which is then spread over the messages.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from paceline.client import Loads
from paceline.config import default_cache_dir
from paceline.errors import DeadlineExceeded, EngineError, StartupError, WorkerLost, quote
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.outcome import SHORT_ANSWER, STOPPED, STOPPED_MESSAGE, Outcome
from paceline.loadtest.target import Clock, Send, TargetInfo
from paceline.loadtest.workload import Job

if TYPE_CHECKING:
    from paceline.loadtest.text_prompts import TextPrompts

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_LINE_BYTES: Final = 2**20


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Answer:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.tokens: list[int] = []
        self.usage: _Usage | None = None
        self.cached_tokens = 0

    def add(self, message: _Message, at: float) -> None:
        if message.error is not None:
            raise EngineError(quote(message.error))
        if message.usage is not None:
            self.usage = message.usage
            if message.usage.prompt_tokens_details is not None:
                self.cached_tokens = message.usage.prompt_tokens_details.cached_tokens or 0
        for choice in message.choices:
            # A closing message may bring its reason alone; one amid the answer may hold back half a character.
            brings_one = bool(choice.text) or choice.finish_reason is None
            tokens = int(brings_one) if choice.token_ids is None else len(choice.token_ids)
            if tokens:
                self.arrivals.append(at)
                self.tokens.append(tokens)

    def settle(self) -> None:
        """Once all has come: brings the messages' tokens into line with the usage."""
        messages = len(self.tokens)
        if self.usage is None or not messages or sum(self.tokens) == self.usage.completion_tokens:
            return
        each, more = divmod(self.usage.completion_tokens, messages)
        self.tokens = [each + (place < more) for place in range(messages)]


class OpenAiTarget:
    """See `Target`. `salt` keeps the prompts of one run from being found in caches that another filled (vLLM)."""

    def __init__(self, config: BenchConfig, salt: str) -> None:
        assert config.openai is not None
        self._config = config
        self._salt = salt
        self._url = config.openai.rstrip("/")
        self._http = aiohttp_or_refuse()
        self._session: Any = None
        self._model = ""
        self._text: TextPrompts | None = None

    async def __aenter__(self) -> Self:
        timeout = self._http.ClientTimeout(total=self._config.timeout_s, connect=None)
        # As many connections as requests; none waits for another's.
        connector = self._http.TCPConnector(limit=0)
        self._session = self._http.ClientSession(connector=connector, timeout=timeout, read_bufsize=_LINE_BYTES)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._session.close()

    async def describe(self) -> TargetInfo:
        """The model that was named, or the first one that is served."""
        body = await self._get("/models")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.MsgspecError as error:
            raise StartupError(f"{self._url}/models answered {quote(body)}, which is no list of models") from error
        wanted = self._config.model
        found = next((model for model in models if wanted in (None, model.id)), None)
        if found is None:
            raise StartupError(f"{self._url} serves {[model.id for model in models]}, and not {wanted or 'any model'}")
        self._model = found.id
        if self._config.tokenizer is not None:
            from paceline.loadtest.text_prompts import TextPrompts  # it pulls in the readers of model files

            self._text = TextPrompts.load(self._config.tokenizer, cache_dir=default_cache_dir(os.environ))
        vocab_size = self._text.vocab_size if self._text is not None else self._config.vocab_size
        assert vocab_size is not None, "the settings ask for one of the two"
        return TargetInfo(address=self._url, model=found.id, vocab_size=vocab_size, context_tokens=found.max_model_len)

    async def loads(self) -> Loads | None:
        """Unknown."""
        return None

    def prepare(self, job: Job, prompt: list[int]) -> Send:
        """See `Target`."""
        body = {
            "model": self._model,
            "prompt": prompt if self._text is None else self._text.of(prompt),
            "max_tokens": job.output_tokens,
            "min_tokens": job.output_tokens,
            "ignore_eos": True,
            "temperature": self._config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": self._salt,
        }
        return partial(self._send, job, msgspec.json.encode(body))

    async def _send(self, job: Job, body: bytes, clock: Clock) -> Outcome:
        answer = _Answer()
        error, message = None, ""
        sent = clock.now()
        try:
            await self._stream(body, answer, clock)
        except _Refused as refusal:
            error, message = f"HTTP_{refusal.status}", refusal.text
        except EngineError as failure:
            error, message = failure.reason, failure.message
        except asyncio.CancelledError:
            error, message = STOPPED, STOPPED_MESSAGE
        except TimeoutError:
            error, message = DeadlineExceeded.reason, f"no end after {self._config.timeout_s:g} s"
        except (self._http.ClientError, OSError) as failure:
            error, message = WorkerLost.reason, f"{type(failure).__name__}: {failure}"
        except (msgspec.MsgspecError, ValueError) as failure:
            error, message = EngineError.reason, f"a message that is not understood: {failure}"
        ended = clock.now()
        answer.settle()
        output_tokens = sum(answer.tokens)
        if error is None and output_tokens != job.output_tokens:
            error, message = SHORT_ANSWER, f"{output_tokens} tokens came of {job.output_tokens}"
        return Outcome(
            index=job.index,
            scheduled_s=job.at_s,
            sent_s=sent,
            ended_s=ended,
            arrivals_s=answer.arrivals,
            tokens=answer.tokens,
            input_tokens=job.input_tokens if answer.usage is None else answer.usage.prompt_tokens,
            asked_tokens=job.output_tokens,
            output_tokens=output_tokens,
            cached_tokens=answer.cached_tokens,
            error=error,
            message=message,
        )

    async def _stream(self, body: bytes, answer: _Answer, clock: Clock) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self._url}/completions", data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(1024)).decode(errors="replace")
                raise _Refused(response.status, text)
            async for line in response.content:
                if not line.startswith(_DATA):
                    continue  # a comment that keeps the line alive, or the empty line behind a message
                data = line[len(_DATA) :].strip()
                if data == _DONE:
                    return
                answer.add(_decode(data), clock.now())
        raise EngineError("the stream ended without [DONE]")

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(self._url + path) as response:
                body: bytes = await response.read()
                if response.status != 200:
                    raise StartupError(f"{self._url}{path} answered HTTP {response.status}: {quote(body[:200])}")
                return body
        except self._http.ClientResponseError as error:  # bytes came that are no HTTP, such as those of gRPC
            raise StartupError(
                f"what listens at {self._url} does not speak HTTP; a router's own port is for --router"
            ) from error
        except (self._http.ClientError, OSError) as error:
            raise WorkerLost(f"no answer from {self._url}: {error}") from error


class _Refused(Exception):
    """An HTTP status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


_decode: Final = msgspec.json.Decoder(_Message).decode


def aiohttp_or_refuse() -> Any:
    """The package aiohttp; StartupError that says how to get it."""
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise StartupError("--openai needs the package aiohttp: install paceline[bench]") from error
    return aiohttp
