"""What waits to be written to one client. A client that reads too slowly is found here, not by memory running out.

gRPC itself takes many thousands of small messages before a write blocks; what is blocked is bounded here, in tokens and
in time. Pieces that pile up are joined into one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from paceline.errors import Overloaded
from paceline.services.router.answer import Piece

WRITE_TIMEOUT_S: Final = 30.0
"""Longest time that a single write may take."""


class Outbox:
    """Pieces on their way to one client, in order.

    `write` writes one piece and returns when gRPC has taken it. `max_tokens` may wait at most; past it `put` raises
    Overloaded. A write that takes longer than `write_timeout_s` calls `on_stuck` once, with the error.
    """

    def __init__(
        self,
        write: Callable[[Piece], Awaitable[None]],
        *,
        max_tokens: int,
        on_stuck: Callable[[Overloaded], None],
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._write = write
        self._max_tokens = max_tokens
        self._on_stuck = on_stuck
        self._write_timeout_s = write_timeout_s
        self._pieces: list[Piece] = []
        self._tokens = 0
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None  # on the loop's clock, while a write is under way

    def put(self, piece: Piece) -> None:
        """Queues a piece. Never blocks. Raises Overloaded where the client is too far behind."""
        self._pieces.append(piece)
        self._tokens += len(piece.token_ids)
        if self._tokens > self._max_tokens:
            raise Overloaded(
                f"the client reads too slowly: {self._tokens} tokens wait to be written, over the limit of "
                f"{self._max_tokens}",
                retry_after_s=1.0,
            )
        self._empty.clear()
        self._filled.set()

    async def flush(self) -> None:
        """Returns when everything is written."""
        await self._empty.wait()

    async def run(self) -> None:
        """Writes until cancelled, or stuck."""
        try:
            # One time-out, moved when it matters: to set one for each write takes as long as all else here.
            async with asyncio.timeout(None) as scope:
                watch = _Watch(self._loop, self._write_timeout_s, lambda: self._writing_since, scope)
                try:
                    await self._write_all()
                finally:
                    watch.close()
        except TimeoutError:
            self._on_stuck(
                Overloaded(
                    f"the client reads too slowly: a write took over {self._write_timeout_s} s",
                    retry_after_s=1.0,
                )
            )

    async def _write_all(self) -> None:
        while True:
            await self._filled.wait()
            while self._pieces:
                pieces, self._pieces = joined(self._pieces), []
                for piece in pieces:
                    self._writing_since = self._loop.time()
                    await self._write(piece)
                    self._writing_since = None
                    self._tokens -= len(piece.token_ids)
            self._filled.clear()
            self._empty.set()


class _Watch:
    """Ends `scope` once what is under way since `since()` has taken `limit_s`. It looks when that may be, no sooner."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        since: Callable[[], float | None],
        scope: asyncio.Timeout,
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._since = since
        self._scope = scope
        self._timer = loop.call_later(limit_s, self._look)

    def close(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now, since = self._loop.time(), self._since()
        due = (now if since is None else since) + self._limit_s
        if due <= now:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._look)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Consecutive pieces as one a choice; the one with the summary is the last."""
    if len(pieces) == 1:
        return list(pieces)
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.choice, []).append(piece)
    return sorted((_as_one(each) for each in by_choice.values()), key=lambda piece: piece.summary is not None)


def _as_one(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        index=pieces[0].index,
        summary=pieces[-1].summary,
        choice=pieces[0].choice,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        prompt_logprobs=tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
        end=pieces[-1].end,
    )
