"""A transport that picks another transport for each peer: which of them two workers share is known only to a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.transport import Handle, Peer, Piece, Polled, Transport
from paceline.log import get_logger

log = get_logger(__name__)


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="by-peer-1"):
    """Each member's own, by name. Grants writes: never printed."""

    members: dict[str, bytes]

    def __repr__(self) -> str:
        return "_Metadata(...)"


@dataclass(frozen=True, slots=True)
class _Way:
    """How a peer is reached."""

    member: str
    peer: Peer  # the member's own name for it
    metadata: bytes = field(repr=False)


class ByPeerTransport:
    """A `Transport` over several, its members: a peer gets the first that both sides have and that connects."""

    def __init__(self, members: Mapping[str, Transport]) -> None:
        """`members` by name, the preferred first."""
        self._members = dict(members)
        self._ways: dict[Peer, _Way] = {}
        self._handles: dict[tuple[str, Handle], Handle] = {}  # ours, by the member's
        self._posted = 0

    def __repr__(self) -> str:
        return f"ByPeerTransport({self._members!r}, peers={len(self._ways)})"

    @property
    def wake_descriptor(self) -> int | None:
        """The first member's that has one; see `Transport.wake_descriptor`."""
        descriptors = (member.wake_descriptor for member in self._members.values())
        return next((each for each in descriptors if each is not None), None)

    def register(self, region: Region) -> bytes:
        """Registers with each member; one that cannot is left out, as long as another can."""
        registered: dict[str, bytes] = {}
        reasons: list[str] = []
        for name, member in list(self._members.items()):
            try:
                registered[name] = member.register(region)
            except StartupError as error:
                reasons.append(error.message)
                log.warning("transport left out", transport=name, reason=error.message)
                member.close()
                del self._members[name]
        if not registered:
            raise StartupError("; ".join(reasons))
        return msgspec.msgpack.encode(_Metadata(registered))

    def connect(self, metadata: bytes) -> Peer:
        """Tries the members in order, and logs which it is and why no earlier one."""
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata).members
        except msgspec.DecodeError as error:
            raise TransferFailed("the peer's metadata is not of this version: is its transport auto too?") from error
        connected = next((peer for peer, way in self._ways.items() if way.metadata == metadata), None)
        if connected is not None:
            raise TransferFailed(f"{connected.name} is connected already")
        reasons: list[str] = []
        for name, member in self._members.items():
            if name not in theirs:
                reasons.append(f"{name}: the peer has none")
                continue
            try:
                way = _Way(name, member.connect(theirs[name]), metadata)
            except TransferFailed as error:
                reasons.append(f"{name}: {error.message}")
                continue
            peer = Peer(f"{name}:{way.peer.name}", way.peer.num_blocks, way.peer.in_stream)
            self._ways[peer] = way
            log.info("transport picked", peer=way.peer.name, transport=name, why="; ".join(reasons) or "preferred")
            return peer
        raise TransferFailed("; ".join(reasons))

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Through the peer's member; see `Transport.post`."""
        way = self._ways.get(peer)
        if way is None:
            raise TransferFailed(f"{peer.name} is not connected, or released")
        theirs = self._members[way.member].post(way.peer, pieces, notification, in_stream=in_stream)
        self._posted += 1
        handle = Handle(self._posted)
        self._handles[way.member, theirs] = handle
        return handle

    def poll(self) -> Polled:
        """Polls every member."""
        polled = [(name, member.poll()) for name, member in self._members.items()]
        return Polled(
            tuple(
                replace(finished, handle=self._handles.pop((name, finished.handle)))
                for name, each in polled
                for finished in each.finished
            ),
            tuple(notification for _, each in polled for notification in each.notifications),
        )

    def release(self, peer: Peer) -> None:
        """See `Transport.release`."""
        way = self._ways.pop(peer, None)
        if way is not None:
            self._members[way.member].release(way.peer)

    def close(self) -> None:
        """Closes every member."""
        for member in self._members.values():
            member.close()
        self._ways.clear()
        self._handles.clear()
