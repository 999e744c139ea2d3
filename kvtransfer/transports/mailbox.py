"""Notifications between processes of one host: messages over Unix sockets that end with their owner, however it ends.

A socket keeps messages whole and in order (SOCK_SEQPACKET), takes them while its reader is stopped, and breaks the
moment either process is gone. Its address is a name in Linux's abstract namespace: nothing is left in a file system
when a process is killed. Names can be listed by anybody on the host, so whoever calls says the owner's secret first,
which peers learn from its metadata; until then nothing that they say is believed.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import secrets
import select
import socket
from dataclasses import dataclass, field

from paceline.errors import TransferFailed

MAX_PAYLOAD_BYTES = 65536
"""Longest notification. A first token with its log-probabilities takes some hundreds of bytes."""

_SECRET_BYTES = 16
_BACKLOG = 128
_MAX_STRANGERS = 64  # that have called and not said the secret yet: a caller says it at once, so they are few


class _Kind(enum.Enum):
    """The first byte of a message, so that none is empty: an empty one would look like the end of its socket."""

    HELLO = b"\x01"  # the secret, then the caller's name
    NOTIFICATION = b"\x02"


class Sent(enum.Enum):
    """What became of a message."""

    YES = "yes"  # it is with the peer
    FULL = "full"  # the peer has not read earlier ones: try again later
    LOST = "lost"  # the peer is gone


@dataclass(frozen=True, slots=True)
class Address:
    """Where a mailbox is, and what it believes."""

    name: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message, and whose it is by the caller's own word."""

    sender: str
    payload: bytes


class Line:
    """A writer's way to one peer's mailbox."""

    def __init__(self, socket_: socket.socket) -> None:
        self._socket = socket_
        self.lost = False  # the peer is gone

    def send(self, payload: bytes) -> Sent:
        """Hands the message over, if it can without waiting."""
        return self._send(_Kind.NOTIFICATION.value + payload)

    def _send(self, message: bytes) -> Sent:
        if self.lost:
            return Sent.LOST
        try:
            self._socket.send(message)
        except BlockingIOError:
            return Sent.FULL
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):
                return Sent.FULL
            self.lost = True
            return Sent.LOST
        return Sent.YES


class Mailbox:
    """Takes notifications in, and opens lines to others' mailboxes. Nothing here ever waits."""

    def __init__(self) -> None:
        self.address = Address(f"paceline-{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES))
        self._listener = _socket()
        self._listener.bind(_abstract(self.address.name))
        self._listener.listen(_BACKLOG)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._callers: dict[int, tuple[socket.socket, str]] = {}  # by descriptor, with the name that each said
        self._strangers: dict[int, socket.socket] = {}  # oldest first
        self._lines: dict[int, Line] = {}

    @property
    def descriptor(self) -> int:
        """Readable when `receive` has something to do: a message or a caller came, or a peer is gone."""
        return self._epoll.fileno()

    def call(self, address: Address, own_name: str) -> Line:
        """Opens a line. Raises `TransferFailed` where nobody is there, or too many wait to be heard."""
        opened = _socket()
        line = Line(opened)
        try:
            opened.connect(_abstract(address.name))
            if line._send(_Kind.HELLO.value + address.secret + own_name.encode()) is not Sent.YES:
                raise ConnectionResetError("it hung up")
        except OSError as error:
            opened.close()
            raise TransferFailed(f"the peer's mailbox does not answer, on this host and network: {error}") from error
        # Nothing ever comes this way but the end, which epoll reports unasked.
        self._epoll.register(opened, select.EPOLLRDHUP)
        self._lines[opened.fileno()] = line
        return line

    def hang_up(self, line: Line) -> None:
        """Closes a line; a second time does nothing."""
        line.lost = True
        descriptor = line._socket.fileno()
        if self._lines.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            line._socket.close()

    def receive(self) -> list[Arrived]:
        """All messages that are there, in order for each sender; also marks the lines whose peers are gone as lost."""
        arrived: list[Arrived] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                arrived += self._answer()
            elif descriptor in self._lines:
                self.hang_up(self._lines[descriptor])
            elif descriptor in self._strangers:
                arrived += self._listen_to_stranger(descriptor)
            elif descriptor in self._callers:
                arrived += self._listen_to_caller(descriptor)
        return arrived

    def close(self) -> None:
        """Ends every line, both ways: peers find this side gone. A second time does nothing."""
        for line in list(self._lines.values()):
            self.hang_up(line)
        for socket_ in (self._listener, *self._strangers.values(), *(each for each, _ in self._callers.values())):
            socket_.close()
        self._strangers.clear()
        self._callers.clear()
        self._epoll.close()

    def _answer(self) -> list[Arrived]:
        arrived: list[Arrived] = []
        with contextlib.suppress(OSError):  # nobody is left waiting, or the process is out of descriptors for now
            while True:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._epoll.register(caller, select.EPOLLIN)
                self._strangers[caller.fileno()] = caller
                arrived += self._listen_to_stranger(caller.fileno())
                if len(self._strangers) > _MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    self._forget(self._strangers.pop(oldest))
        return arrived

    def _listen_to_stranger(self, descriptor: int) -> list[Arrived]:
        stranger = self._strangers[descriptor]
        message = _read(stranger)
        if message is None:
            return []
        del self._strangers[descriptor]
        secret, name = message[1 : 1 + _SECRET_BYTES], message[1 + _SECRET_BYTES :]
        if message[:1] != _Kind.HELLO.value or not hmac.compare_digest(secret, self.address.secret):
            self._forget(stranger)
            return []
        self._callers[descriptor] = (stranger, name.decode(errors="replace"))
        return self._listen_to_caller(descriptor)

    def _listen_to_caller(self, descriptor: int) -> list[Arrived]:
        caller, name = self._callers[descriptor]
        arrived: list[Arrived] = []
        while (message := _read(caller)) is not None:
            if message[:1] != _Kind.NOTIFICATION.value:  # the end, or no peer of this version
                del self._callers[descriptor]
                self._forget(caller)
                break
            arrived.append(Arrived(name, message[1:]))
        return arrived

    def _forget(self, caller: socket.socket) -> None:
        self._epoll.unregister(caller)
        caller.close()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MAX_PAYLOAD_BYTES)
    return made


def _abstract(name: str) -> str:
    return f"\0{name}"


def _read(socket_: socket.socket) -> bytes | None:
    """The next message; None where there is none yet, b"" where there will be no more."""
    try:
        return socket_.recv(1 + MAX_PAYLOAD_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
