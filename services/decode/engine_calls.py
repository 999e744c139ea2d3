"""Calls of others that the engine answers, each once: by a number of its own, in its reports."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from paceline.errors import PacelineError
from paceline.services.decode.messages import CallRefused, Redirected, WriteGranted

CallAnswer: TypeAlias = WriteGranted | Redirected


class EngineCalls:
    """Those that wait for their answers."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[CallAnswer]] = {}
        self._ids = itertools.count(1)
        self._over: PacelineError | None = None

    async def ask(self, send: Callable[[msgspec.Struct], None], make: Callable[[int], msgspec.Struct]) -> CallAnswer:
        """Sends the command that `make` gives for the call's number; its answer, or the error it was refused with.

        After `fail_all` it is that error: nobody would answer.
        """
        if self._over is not None:
            raise self._over
        call_id = next(self._ids)
        answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        try:
            send(make(call_id))
            return await answer
        finally:
            del self._waiting[call_id]

    def answer(self, call_id: int, answer: CallAnswer) -> None:
        """Ends a call, unless its caller has gone."""
        call = self._waiting.get(call_id)
        if call is not None and not call.done():
            call.set_result(answer)

    def refuse(self, event: CallRefused) -> None:
        """Ends a call with an error, unless its caller has gone."""
        call = self._waiting.get(event.call_id)
        if call is not None and not call.done():
            call.set_exception(event.failure.error())

    def fail_all(self, error: PacelineError) -> None:
        """Ends every call with the error, and those still to come: the engine is gone, or its worker stops."""
        self._over = error
        for call in self._waiting.values():
            if not call.done():
                call.set_exception(error)
