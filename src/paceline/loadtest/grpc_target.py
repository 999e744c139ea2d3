"""A Paceline router as a target, through the client that users have."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Self

from paceline.client import AsyncClient, Finish, Loads
from paceline.errors import PacelineError, StartupError
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.outcome import BROKEN_STREAM, SHORT_ANSWER, STOPPED, STOPPED_MESSAGE, Outcome, Served
from paceline.loadtest.target import Clock, Send, TargetInfo
from paceline.loadtest.workload import Job


class GrpcTarget:
    """See `Target`. `salt` keeps the prompts of one run from being found in caches that another filled."""

    def __init__(self, config: BenchConfig, salt: str) -> None:
        self._config = config
        self._salt = salt
        self._client: AsyncClient

    async def __aenter__(self) -> Self:
        self._client = AsyncClient(self._config.router)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._client.close()

    async def describe(self) -> TargetInfo:
        """The router's model. Raises StartupError where another one is asked for: it would refuse each request."""
        info = await self._client.model_info()
        if self._config.model and self._config.model != info.model:
            raise StartupError(f"{self._config.router} serves {info.model!r}, and not {self._config.model!r}")
        return TargetInfo(
            address=self._config.router,
            model=info.model,
            vocab_size=self._config.vocab_size or info.limits.vocab_size,
            context_tokens=info.limits.context_tokens,
        )

    async def loads(self) -> Loads | None:
        """The router's queue, and its workers' pools as their latest heart-beats have them."""
        return await self._client.loads()

    def prepare(self, job: Job, prompt: list[int]) -> Send:
        """See `Target`."""
        return partial(self._send, job, prompt)

    async def _send(self, job: Job, prompt: list[int], clock: Clock) -> Outcome:
        arrivals: list[float] = []
        tokens: list[int] = []
        finish: Finish | None = None
        error, message = None, ""
        sent = clock.now()
        try:
            stream = self._client.generate(
                prompt,
                timeout=self._config.timeout_s,
                model=self._config.model or "",
                cache_salt=self._salt,
                max_tokens=job.output_tokens,
                ignore_eos=True,
                temperature=self._config.temperature,
            )
            async with stream:
                received = 0
                async for chunk in stream:
                    if chunk.token_ids:
                        arrivals.append(clock.now())
                        tokens.append(len(chunk.token_ids))
                        if chunk.index != received:
                            error, message = BROKEN_STREAM, f"token {chunk.index} came after {received} tokens"
                        received += len(chunk.token_ids)
                    finish = chunk.finish
        except PacelineError as failure:
            error, message = failure.reason, failure.message
        except asyncio.CancelledError:
            error, message = STOPPED, STOPPED_MESSAGE
        ended = clock.now()
        output_tokens = sum(tokens)
        if error is None and finish is None:
            error, message = BROKEN_STREAM, "the router ended the answer without saying why"
        if error is None and output_tokens != job.output_tokens:
            error, message = SHORT_ANSWER, f"{output_tokens} tokens came of {job.output_tokens}"
        return Outcome(
            index=job.index,
            scheduled_s=job.at_s,
            sent_s=sent,
            ended_s=ended,
            arrivals_s=arrivals,
            tokens=tokens,
            input_tokens=job.input_tokens,
            asked_tokens=job.output_tokens,
            output_tokens=output_tokens,
            cached_tokens=0 if finish is None else finish.usage.cached_tokens,
            error=error,
            message=message,
            served=None if finish is None else _served(finish),
        )


def _served(finish: Finish) -> Served:
    transfer = finish.transfer
    return Served(
        queued_s=finish.timings.queued_s,
        prefill_s=finish.timings.prefill_s,
        first_token_s=finish.timings.first_token_s,
        bytes=transfer.bytes,
        blocks=transfer.blocks,
        held_blocks=transfer.held_blocks,
        transfer_s=transfer.duration_s,
        parts=transfer.parts,
        attempts=finish.attempts,
        computed_on_decode=finish.prompt_tokens_computed_on_decode,
        prefill_worker=None if finish.prefill_worker is None else finish.prefill_worker.worker_id,
        decode_worker=None if finish.decode_worker is None else finish.decode_worker.worker_id,
    )
