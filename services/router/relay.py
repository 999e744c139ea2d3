"""One request from end to end.

The life of a request, in the router:

1. `face` reads it into a valid `Request` (`prompt`, `reading`), and gives it a `Relay`.
2. `admission`: it takes a ticket. Where its turn comes and `placement` finds room, it holds claims on a decode and a
   prefill worker; until then it waits, at most the queue's patience and its own deadline.
3. `leg`: both workers are called at once under a fresh reservation id. A worker that refuses sends the request back to
   where it stood in the line; one that is lost before the client was sent anything, once.
4. Tokens pass through `answer`, which merges them by index and makes text of them, into `outbox`, which writes them.
5. The last piece carries the summary. However it ends, both calls are cancelled and both claims are given back.

Deadline, `Abort`, a client that reads too slowly and the end of the router's grace all end a relay the same way: by
`interrupt`. The client's own cancellation is asyncio's.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec

from paceline.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    PacelineError,
    RequestCancelled,
    WorkerLost,
)
from paceline.log import get_logger
from paceline.metrics import RouterMetrics
from paceline.services.router.admission import Admission
from paceline.services.router.answer import Piece, Summary
from paceline.services.router.choices import Answers, Heard
from paceline.services.router.events import Again, Ended, Record
from paceline.services.router.fleet import Fleet, Placed
from paceline.services.router.leg import Leg
from paceline.services.router.outbox import WRITE_TIMEOUT_S, Outbox
from paceline.services.router.placement import Ask
from paceline.services.router.prompt import Request
from paceline.services.router.words import ChoiceFinished, Job, NewTokens, TransferSum
from paceline.types import FinishReason, Limits, ReservationId, Usage, check_lengths

_log = get_logger(__name__)

_LOST_RETRIES: Final = 1
"""How often a request goes to another decode worker after one was lost."""
_UNLIMITED: Final = 2**62
_FAREWELL_S: Final = 1.0
"""Bound on writing, before an error, the pieces that came before it."""


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What every relay of a router shares."""

    fleet: Fleet
    admission: Admission[Placed]
    metrics: RouterMetrics
    own_limits: Limits
    queue_timeout_s: float
    max_unacked_tokens: int
    write_timeout_s: float = WRITE_TIMEOUT_S


class Relay:
    """One request. `write` writes one piece to the client and returns when gRPC has taken it."""

    def __init__(
        self,
        request: Request,
        make_answers: Callable[[], Answers],
        means: Means,
        write: Callable[[Piece], Awaitable[None]],
        *,
        arrived: float,
    ) -> None:
        """`make_answers` gives the answers anew for each try whose words nobody has seen; `arrived` is when the request
        came, on the loop's clock.
        """
        self._request = request
        self._make_answers = make_answers
        self._answer = make_answers()
        self._sent = False  # something of the answer is on its way to the client
        self._means = means
        self._arrived = arrived
        self._ask = Ask(prompt_tokens=len(request.prompt), max_tokens=request.sampling.max_tokens)
        self._outbox = Outbox(
            write,
            # What leaves at once, at the end, says nothing of how fast the client reads.
            max_tokens=_UNLIMITED if request.comes_at_once else means.max_unacked_tokens,
            on_stuck=self.interrupt,
            write_timeout_s=means.write_timeout_s,
        )
        self._record = Record()
        self._interruption: PacelineError | None = None
        self._scope: asyncio.Timeout | None = None  # while it runs
        self._first_token_s: float | None = None
        self._last_token_at = arrived

    def interrupt(self, error: PacelineError) -> None:
        """Ends the relay with `error`, wherever it is. The first interruption counts."""
        self._interruption = self._interruption or error
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._now)

    async def run(self) -> Summary:
        """Serves the request to its last piece. Raises what the client is to be told instead."""
        outcome = "internal"  # for what is no PacelineError
        try:
            summary = await self._run()
            outcome = summary.reason.value
            return summary
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except PacelineError as error:
            outcome = error.reason.lower()
            _log.info("request failed", reason=error.reason, error=error.message, tokens_sent=self._answer.num_tokens)
            raise
        finally:
            self._means.metrics.requests.labels(outcome).inc()
            self._means.metrics.request_seconds.observe(self._age_s)

    async def _run(self) -> Summary:
        writer = asyncio.get_running_loop().create_task(self._outbox.run())
        writer.add_done_callback(self._on_writer_done)
        try:
            return await self._serve_in_time()
        except PacelineError:
            # What came before the error is the client's still, if it takes it.
            if not writer.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FAREWELL_S):
                        await self._outbox.flush()
            raise
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _on_writer_done(self, writer: asyncio.Task[None]) -> None:
        """A writer that broke would leave the request waiting for it."""
        defect = None if writer.cancelled() else writer.exception()
        if isinstance(defect, PacelineError):
            self.interrupt(defect)
        elif defect is not None:
            _log.warning("writing to the client failed", exc_info=defect)
            self.interrupt(EngineError(f"writing to the client failed: {type(defect).__name__}"))

    async def _serve_in_time(self) -> Summary:
        try:
            async with asyncio.timeout_at(self._arrived + self._request.timeout_s) as self._scope:
                if self._interruption is not None:
                    raise self._interruption
                return await self._serve()
        except TimeoutError:
            raise self._interruption or self._out_of_time() from None
        finally:
            self._scope = None

    async def _serve(self) -> Summary:
        ended = await self._go()
        completion_tokens = None if ended.decode is None else ended.decode.completion_tokens
        tail = self._answer.end(completion_tokens=completion_tokens)
        summary = self._summary(ended)
        self._means.fleet.served(summary.usage)
        self._outbox.put(msgspec.structs.replace(tail, summary=summary))
        await self._outbox.flush()
        _log.info(
            "request served",
            finish=summary.reason.value,
            prompt_tokens=summary.usage.prompt_tokens,
            completion_tokens=summary.usage.completion_tokens,
            prefill=summary.prefill_worker and str(summary.prefill_worker),
            decode=summary.decode_worker and str(summary.decode_worker),
            first_token_ms=round(summary.first_token_s * 1e3, 1),
            total_ms=round(summary.total_s * 1e3, 1),
        )
        return summary

    async def _go(self) -> Ended:
        """Goes from place to place until one serves the request to its end."""
        means, retries_left = self._means, _LOST_RETRIES
        ticket = means.admission.ticket(priority=self._request.priority)
        returning = False
        while True:
            placed = await means.admission.place(
                ticket,
                self._try_place,
                give_back=means.fleet.give_back,
                impatient=self._impatient,
                returning=returning,
            )
            if not returning:
                means.metrics.queue_seconds.observe(self._age_s)
            end = await self._go_leg(placed)
            if isinstance(end, Ended):
                return self._checked(end)
            returning = True
            _log.warning("placed again", refused=end.refused, reason=end.error.reason, error=end.error.message)
            means.fleet.count_fallback("refused" if end.refused else "worker_lost")
            if not end.refused:
                if not retries_left:
                    raise WorkerLost(f"a second decode worker was lost: {end.error.message}") from end.error
                retries_left -= 1

    async def _go_leg(self, placed: Placed) -> Ended | Again:
        metrics = self._means.metrics
        metrics.placements.labels("decode" if placed.prefill is None else "prefill").inc()
        if placed.local_reason is not None:
            self._means.fleet.count_fallback(placed.local_reason.value)
        self._record = Record()
        if not self._sent:
            self._answer = self._make_answers()
        leg = Leg(
            self._job(),
            self._ask,
            placed,
            fleet=self._means.fleet,
            record=self._record,
            deliver=self._deliver,
            delivered=lambda: self._sent,
        )
        with metrics.active.track_inprogress():
            return await leg.run()

    def _job(self) -> Job:
        return Job(
            request_id=self._request.request_id,
            reservation_id=ReservationId(uuid.uuid4().hex),
            prompt=self._request.encoded_prompt,
            sampling=self._request.sampling,
            timeout_s=max(0.001, self._request.timeout_s - self._age_s),
            priority=self._request.priority,
            cache_salt=self._request.cache_salt,
        )

    def _try_place(self) -> Placed | None:
        fleet = self._means.fleet
        placed = fleet.place(self._ask)
        if placed is None:
            try:
                check_lengths(
                    self._ask.prompt_tokens,
                    max_tokens=self._ask.max_tokens,
                    limits=fleet.limits(self._means.own_limits),
                )
            except InvalidRequest as error:
                # It could be held when it was accepted: its client did nothing wrong, and may come again.
                raise NoWorker(f"the decode workers that could hold the request are gone: {error.message}") from error
        return placed

    def _deliver(self, said: NewTokens | ChoiceFinished) -> Heard:
        pieces, heard = self._answer.take(said)
        for piece in pieces:
            if piece.token_ids:
                self._observe(piece)
            self._sent = True
            self._outbox.put(piece)
        return heard

    def _observe(self, piece: Piece) -> None:
        metrics, now = self._means.metrics, self._now
        if self._first_token_s is None:
            self._first_token_s = now - self._arrived
            metrics.first_token_seconds.observe(self._first_token_s)
        else:
            # Tokens that come together share the time since those before.
            per_token_s = (now - self._last_token_at) / len(piece.token_ids)
            for _ in piece.token_ids:
                metrics.inter_token_seconds.observe(per_token_s)
        self._last_token_at = now
        metrics.generated_tokens.inc(len(piece.token_ids))

    def _summary(self, ended: Ended) -> Summary:
        record, answer, decode = self._record, self._answer, ended.decode
        reserved_at = self._now if record.reserved_at is None else record.reserved_at
        return Summary(
            reason=FinishReason.STOP if answer.stop_text is not None else answer.last_reason or ended.reason,
            usage=Usage(
                prompt_tokens=len(self._request.prompt),
                completion_tokens=answer.num_tokens,
                cached_tokens=record.cached_tokens if decode is None or record.prefill_worker else decode.cached_tokens,
            ),
            stop_text=answer.stop_text,
            cumulative_logprob=answer.cumulative_logprob,
            queued_s=reserved_at - self._arrived,
            prefill_s=record.prefill_s or 0.0,
            first_token_s=self._first_token_s or 0.0,
            total_s=self._age_s,
            transfer=_both(record.transfer, None if decode is None else decode.transfer),
            prefill_worker=record.prefill_worker,
            decode_worker=record.decode_worker,
            prompt_tokens_computed_on_decode=0 if decode is None else decode.prompt_tokens_computed,
            attempts=record.attempts if decode is None else max(record.attempts, decode.attempts),
        )

    def _checked(self, ended: Ended) -> Ended:
        """Raises for an end that is none: a decode worker's finish may say that it was cancelled, or failed."""
        match ended.reason:
            case FinishReason.CANCELLED:
                raise RequestCancelled("the request was aborted at its decode worker")
            case FinishReason.ERROR:
                raise EngineError(f"decode worker {self._record.decode_worker} failed the request")
            case _:
                return ended

    def _impatient(self, retry_after_s: float) -> PacelineError:
        waited = f"no place was found within the queue's {self._means.queue_timeout_s:g} s"
        if (obstacle := self._means.fleet.obstacle) is not None:
            return NoWorker(f"{waited}: {obstacle}")
        return Overloaded(f"{waited}: every worker is full", retry_after_s=retry_after_s)

    def _out_of_time(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request's {self._request.timeout_s:g} s ran out after {self._answer.num_tokens} tokens"
        )

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _age_s(self) -> float:
        return self._now - self._arrived


def _both(sent: TransferSum, landed: TransferSum | None) -> TransferSum:
    """The decode worker's view, which is whole; the prefill worker alone knows what it had still to compute."""
    if landed is None:
        return sent
    overlapped = max(sent.parts_before_last_chunk, landed.parts_before_last_chunk)
    return msgspec.structs.replace(landed, parts_before_last_chunk=overlapped)
