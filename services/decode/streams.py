"""The streams that answers leave by: a request's own, and the token streams that routers share among their requests.

A request that names an open token stream says everything over it, in order, until that ends; from then on, and where it
never had one, it uses its own. Nobody knows what of a stream that ended has arrived, so it begins again with its first
word, which the caller merges by index. An error is a stream's own end: it, too, comes behind all that was said.
"""

from __future__ import annotations

import asyncio
from typing import Final

from paceline.errors import PacelineError
from paceline.services.decode.messages import Over
from paceline.services.decode.replies import StreamEvent
from paceline.services.decode.told import Told
from paceline.services.worker.mailbox import Mailbox
from paceline.types import ReservationId

LINGER_S: Final = 10.0
"""How long a caller may take to end its call after the last word; then it gets all of it over that call."""


class TokenStream:
    """One caller's. Its reader takes all that has come since it last did: a step's, where it keeps up."""

    def __init__(self) -> None:
        self.ended = False
        self._events: Mailbox[StreamEvent | None] = Mailbox()
        self._requests: set[RequestStream] = set()

    def put(self, event: StreamEvent) -> None:
        """Adds what is said of one of its requests. Never waits."""
        self._events.put(event)

    def join(self, request: RequestStream) -> None:
        """From now on `request` is said over it."""
        self._requests.add(request)

    def leave(self, request: RequestStream) -> None:
        """The request is over, or goes on by itself. A second call does nothing."""
        self._requests.discard(request)

    async def take(self) -> list[StreamEvent]:
        """What has come, at least one event; waits only for the first. It may be none once it has `ended`."""
        return [event for event in await self._events.take() if event is not None]

    def end(self) -> None:
        """Sends its requests on by themselves, and its reader home. A second call does nothing."""
        self.ended = True
        for request in list(self._requests):
            request.go_alone()
        self._events.put(None)


class RequestStream:
    """One request's."""

    def __init__(self, reservation_id: ReservationId, shared: TokenStream | None) -> None:
        self._own: Mailbox[StreamEvent | PacelineError] = Mailbox()
        self._shared = shared
        self._told = Told(reservation_id)
        self.over = False
        """The last word is said, whether it has arrived or not."""
        self._linger: asyncio.TimerHandle | None = None
        if shared is not None:
            shared.join(self)

    def put(self, event: StreamEvent) -> None:
        """Says something of it. Never waits."""
        if isinstance(event, Over):
            self.over = True
            if event.failure is not None:
                self.go_alone()
        if self._shared is None:
            self._own.put(event)
            return
        self._told.note(event)
        self._shared.put(event)
        if self.over:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self.go_alone)

    def fail(self, error: PacelineError) -> None:
        """Ends it with an error, behind what was said."""
        self.go_alone()
        self._own.put(error)

    def go_alone(self) -> None:
        """Says everything again, and what follows, over its own call. A second call does nothing."""
        if self._shared is None:
            return
        self._shared.leave(self)
        self._shared = None
        for event in self._told.again():
            self._own.put(event)

    async def take(self) -> list[StreamEvent | PacelineError]:
        """What is to be said over its own call, at least one event; waits only for the first."""
        return await self._own.take()

    def close(self) -> None:
        """Nobody listens any more."""
        if self._linger is not None:
            self._linger.cancel()
        if self._shared is not None:
            self._shared.leave(self)
            self._shared = None
