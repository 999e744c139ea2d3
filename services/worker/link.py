"""The link between a front and its engine process: ZeroMQ PUSH/PULL over Unix sockets, msgspec structs, never blocking.

Each end binds the socket that it reads and connects the one that it writes. Commands flow down, one struct a message;
events flow up, one message for each round of the engine's loop. A full queue refuses the command (Overloaded):
backpressure reaches the caller, and neither side ever waits for the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

from paceline.errors import ConfigError, Overloaded

_QUEUED_MESSAGES: Final = 4096
_UNIX_PATH_BYTES: Final = 107  # sun_path less its terminating zero

Inbound = TypeVar("Inbound")


class FrontLink(Generic[Inbound]):
    """The front's end, for asyncio. `events` is the union of message types that it receives."""

    def __init__(self, directory: Path, events: Any) -> None:
        paths = {name: _socket_path(directory, name) for name in ("commands", "events")}
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        _limit(self._push)
        _limit(self._pull)
        # A socket that connects queues at once, one that binds has no queue before its peer is there.
        self._push.connect(f"ipc://{paths['commands']}")
        _bind(self._context, self._pull, paths["events"])
        self._loop.add_reader(self._pull.FD, self._wake)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(events)

    def send(self, command: msgspec.Struct) -> None:
        """Queues a command; Overloaded when the engine is too far behind."""
        try:
            self._push.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again as error:
            raise Overloaded(
                f"the engine is {_QUEUED_MESSAGES} messages behind and takes no more", retry_after_s=1.0
            ) from error

    async def receive(self) -> Inbound:
        """The next message; at once where it is there."""
        while True:
            self._woken.clear()
            try:
                return self._decoder.decode(self._pull.recv(zmq.NOBLOCK))
            except zmq.Again:
                await self._woken.wait()

    def _wake(self) -> None:
        self._pull.getsockopt(zmq.EVENTS)  # the look that makes the descriptor quiet: the loop would come here for ever
        self._woken.set()

    def close(self) -> None:
        """Drops what is queued and closes the sockets."""
        self._loop.remove_reader(self._pull.FD)
        self._push.close(0)
        self._pull.close(0)
        self._context.term()


class EngineLink(Generic[Inbound]):
    """The engine's end, for a plain loop. `commands` is the union of message types that it receives."""

    def __init__(self, directory: Path, commands: Any) -> None:
        paths = {name: _socket_path(directory, name) for name in ("commands", "events")}
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        _limit(self._pull)
        _limit(self._push)
        _bind(self._context, self._pull, paths["commands"])
        self._push.connect(f"ipc://{paths['events']}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(commands)
        self._outbox: deque[bytes] = deque()

    @property
    def file_descriptor(self) -> int:
        """Readable when a command *may* have come. It is edge-triggered: call `receive_all` before each wait."""
        return int(self._pull.FD)

    def receive_all(self) -> list[Inbound]:
        """All commands that are there; never waits."""
        commands: list[Inbound] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message. What a slow front does not take yet is kept here, in order: tokens are never lost."""
        self._outbox.append(self._encoder.encode(message))
        self.flush()

    def flush(self) -> bool:
        """Sends what is kept; True when nothing is left."""
        while self._outbox:
            try:
                self._push.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._outbox.popleft()
        return True

    def close(self, linger_ms: int = 1000) -> None:
        """Gives the last messages a moment to leave, and closes the sockets."""
        self._pull.close(0)
        self._push.close(linger_ms)
        self._context.term()


def _limit(socket: zmq.Socket[Any]) -> None:
    socket.sndhwm = socket.rcvhwm = _QUEUED_MESSAGES


def _bind(context: zmq.Context[Any], socket: zmq.Socket[Any], path: Path) -> None:
    try:
        path.unlink(missing_ok=True)  # left by a life that was killed; the start lock says that it is gone
        socket.bind(f"ipc://{path}")
    except (OSError, zmq.ZMQError) as error:
        context.destroy(0)
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}") from error


def _socket_path(directory: Path, name: str) -> Path:
    path = directory / name
    if len(str(path).encode()) > _UNIX_PATH_BYTES:
        raise ConfigError(f"run_dir is too long: {path} is over the {_UNIX_PATH_BYTES} bytes of a Unix socket's name")
    return path
