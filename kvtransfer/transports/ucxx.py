"""UCX without NIXL, through `ucxx`: messages with tags, which the target receives straight into its blocks.

A message needs a receiver, so a post is an offer first: the writer says which blocks it will send under which tags,
and sends. The target checks the blocks against its pool, receives into them, and answers; only then is the post over
for the writer. So every write takes the target's consent, and its polling: one that is stopped holds its writers'
handles up.

What `ucxx` does, found by trying it: a message's buffer must be kept by whoever sends it until the request is complete,
or other bytes arrive; a peer's death ends the requests on its endpoint with an error at the next progress, and closing
that endpoint afterwards is a segmentation fault.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.errors import StartupError, TransferFailed
from paceline.kvtransfer.region import Region
from paceline.kvtransfer.transports.transport import (
    Finished,
    Handle,
    Notification,
    Peer,
    Piece,
    Polled,
    check_block_bytes,
    check_pieces,
)
from paceline.kvtransfer.transports.ucxx_messages import DECODER, Answer, Metadata, Offer, view
from paceline.log import get_logger

log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Messages:
    """Messages under way, with the buffers that they are read from or written to."""

    requests: list[Any]
    buffers: list[Any] = field(repr=False)

    @property
    def complete(self) -> bool:
        return all(request.completed for request in self.requests)


@dataclass(eq=False, slots=True)
class _Remote:
    """A peer's pool, and the way to it. It outlives its release until its last handle is terminal."""

    region: Region
    tag: int = field(repr=False)
    endpoint: Any
    outstanding: int = 0
    released: bool = False


@dataclass(eq=False, slots=True)
class _Write:
    handle: Handle
    peer: Peer
    remote: _Remote
    sent: _Messages
    unsent: str | None = None  # why a part of it was never handed to UCX: no answer will come then
    answer: Answer | None = None


@dataclass(eq=False, slots=True)
class _Incoming:
    """An offer whose data is being received."""

    offer: Offer
    received: _Messages


def available() -> str | None:
    """None where `ucxx` can be used, else the reason why not."""
    try:
        importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as error:
        return f"ucxx cannot be imported: {error}"
    return None


class UcxxTransport:
    """A `Transport` over one UCX worker, without a progress thread. The docstrings of `Transport` bind it."""

    def __init__(self, name: str) -> None:
        """`name` becomes part of the peer's name; a random part keeps two lives apart. Raises `StartupError` without
        `ucxx`.
        """
        reason = available()
        if reason is not None:
            raise StartupError(f"transport ucxx: {reason}; install paceline[ucxx]")
        self._library: Any = importlib.import_module("ucxx._lib.libucxx")
        self._array: Any = importlib.import_module("ucxx._lib.arr").Array
        self._errors: tuple[type[Exception], ...] = (self._library.UCXError, RuntimeError)
        self._name = f"{name}#{secrets.token_hex(4)}"
        self._tag = secrets.randbits(63)
        try:
            self._worker: Any = self._library.UCXWorker(self._library.UCXContext({}))
        except self._errors as error:
            raise StartupError(f"transport ucxx: UCX cannot start: {error}") from error
        self._region: Region | None = None
        self._remotes: dict[Peer, _Remote] = {}
        self._writers: dict[str, Any] = {}  # endpoints for answers, by writer
        self._writes: dict[int, _Write] = {}
        self._arriving: list[_Messages] = []  # offers and answers
        self._incoming: list[_Incoming] = []
        self._answers: list[_Messages] = []
        self._posted = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"UcxxTransport({self._name!r}, peers={len(self._remotes)}, outstanding={len(self._writes)})"

    @property
    def wake_descriptor(self) -> int | None:
        """None: UCX's own must be armed before each sleep."""
        return None

    def register(self, region: Region) -> bytes:
        """Notes the pool: UCX registers memory as it is used; see `Transport.register`."""
        if self._region is not None:
            raise StartupError("transport ucxx: one transport registers one region")
        self._region = region
        address = self._worker.address.tobytes()
        return msgspec.msgpack.encode(
            Metadata(self._name, address, self._tag, region.num_blocks, region.block_bytes, region.device)
        )

    def connect(self, metadata: bytes) -> Peer:
        """Opens an endpoint; see `Transport.connect`."""
        ours = self._own_region()
        try:
            theirs = msgspec.msgpack.decode(metadata, type=Metadata)
            region = Region(ours.address, theirs.num_blocks, theirs.block_bytes, theirs.device)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed("the peer's metadata is not of this version of the ucxx transport") from error
        check_block_bytes(ours, region)
        if region.device != ours.device:
            raise TransferFailed(f"the peer's pool is on {region.device} and ours on {ours.device}")
        peer = Peer(theirs.name, theirs.num_blocks)
        if peer in self._remotes:
            raise TransferFailed(f"{theirs.name} is connected already")
        self._remotes[peer] = _Remote(region, theirs.tag, self._endpoint(theirs.address))
        return peer

    def post(
        self, peer: Peer, pieces: Sequence[Piece], notification: bytes | None, *, in_stream: bool = False
    ) -> Handle:
        """Sends the offer and the data; see `Transport.post`."""
        assert not in_stream, "UCX knows nothing of streams"
        ours = self._own_region()
        remote = self._remotes.get(peer)
        if remote is None or remote.released:
            raise TransferFailed(f"{peer.name} is not connected, or released")
        if not remote.endpoint.alive:
            raise TransferFailed(f"{peer.name} is lost")
        check_pieces(ours, remote.region, pieces)
        if not pieces and notification is None:
            raise ValueError("a post of nothing")
        self._posted += 1
        first_tag = secrets.randbits(62)
        spans = tuple((piece.target_block, piece.num_blocks) for piece in pieces)
        address = self._worker.address.tobytes()
        offer = Offer(self._name, address, self._tag, self._posted, first_tag, spans, notification)
        sent = _Messages([], [])
        write = _Write(Handle(self._posted), peer, remote, sent)
        try:
            self._send(remote.endpoint, msgspec.msgpack.encode(offer), remote.tag, sent)
            for place, piece in enumerate(pieces):
                self._send(remote.endpoint, view(ours, piece.source_block, piece.num_blocks), first_tag + place, sent)
        except self._errors as error:
            write.unsent = str(error)  # what was sent before ends through `poll`
        self._writes[self._posted] = write
        remote.outstanding += 1
        return write.handle

    def poll(self) -> Polled:
        """Takes offers and answers, answers what is there, and ends what was answered; see `Transport.poll`."""
        if self._closed:
            return Polled()
        try:
            self._worker.progress()
        except self._errors as error:
            log.warning("UCX makes no progress", error=str(error))
        for message in self._messages():
            if isinstance(message, Answer):
                write = self._writes.get(message.number)
                if write is not None:
                    write.answer = message
            else:
                self._receive(message)
        notifications = tuple(self._landed())
        self._answers = [each for each in self._answers if not each.complete]
        finished = tuple(self._ended())
        return Polled(finished, notifications)

    def release(self, peer: Peer) -> None:
        """Closes the endpoint at once, or after the last outstanding handle; see `Transport.release`."""
        remote = self._remotes.pop(peer, None)
        if remote is not None:
            remote.released = True
            self._close_if_idle(remote)

    def close(self) -> None:
        """Closes every endpoint; see `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        for endpoint in [*(remote.endpoint for remote in self._remotes.values()), *self._writers.values()]:
            self._hang_up(endpoint)
        try:
            self._worker.cancel_inflight_requests()
            self._worker.progress()
        except self._errors as error:
            log.debug("clean-up refused", error=str(error))
        self._remotes.clear()
        self._writers.clear()

    def _own_region(self) -> Region:
        if self._closed or self._region is None:
            raise TransferFailed("the transport is closed, or has no region registered")
        return self._region

    def _endpoint(self, address: bytes) -> Any:
        try:
            theirs = self._library.UCXAddress.create_from_buffer(bytearray(address))
            return self._worker.create_endpoint_from_worker_address(theirs, True)
        except self._errors as error:
            raise TransferFailed(f"the peer's metadata was refused: {error}") from error

    def _send(self, endpoint: Any, contents: Any, tag: int, sent: _Messages) -> None:
        buffer = self._array(contents)
        sent.buffers += (contents, buffer)
        sent.requests.append(endpoint.tag_send(buffer, self._library.UCXXTag(tag)))

    def _messages(self) -> list[Offer | Answer]:
        """Offers and answers that came, whole: a long one may take its sender's help, and so some polls."""
        tag = self._library.UCXXTag(self._tag)
        while (probed := self._worker.tag_probe(tag)).matched:
            contents = bytearray(probed.length)
            buffer = self._array(contents)
            self._arriving.append(_Messages([self._worker.tag_recv(buffer, tag)], [contents, buffer]))
        whole = [each for each in self._arriving if each.complete]
        if whole:
            self._arriving = [each for each in self._arriving if each not in whole]
        messages: list[Offer | Answer] = []
        for each in whole:
            try:
                each.requests[0].check_error()
                messages.append(DECODER.decode(each.buffers[0]))
            except msgspec.DecodeError as error:
                log.warning("a message that is none was ignored", error=str(error))
            except self._errors as error:
                log.debug("a message was cut off", error=str(error))
        return messages

    def _receive(self, offer: Offer) -> None:
        ours = self._own_region()
        received = _Messages([], [])
        if all(ours.holds(*span) for span in offer.spans):
            for place, span in enumerate(offer.spans):
                contents = view(ours, *span)
                buffer = self._array(contents)
                received.buffers += (contents, buffer)
                tag = self._library.UCXXTag(offer.first_tag + place)
                received.requests.append(self._worker.tag_recv(buffer, tag))
            self._incoming.append(_Incoming(offer, received))
        else:
            self._answer(offer, "its blocks are outside the pool")

    def _landed(self) -> list[Notification]:
        """Offers whose data is all there: they are answered, and their notifications may be seen."""
        notifications: list[Notification] = []
        for incoming in [each for each in self._incoming if each.received.complete]:
            self._incoming.remove(incoming)
            try:
                for request in incoming.received.requests:
                    request.check_error()
            except self._errors as error:
                log.debug("a write was cut off", writer=incoming.offer.writer, error=str(error))
                continue
            if incoming.offer.notification is not None:
                notifications.append(Notification(incoming.offer.writer, incoming.offer.notification))
            self._answer(incoming.offer, None)
        return notifications

    def _answer(self, offer: Offer, error: str | None) -> None:
        sent = _Messages([], [])
        try:
            endpoint = self._writers.get(offer.writer)
            if endpoint is None or not endpoint.alive:
                endpoint = self._writers[offer.writer] = self._endpoint(offer.address)
            answer = msgspec.msgpack.encode(Answer(offer.number, error))
            self._send(endpoint, answer, offer.answer_tag, sent)
        except TransferFailed as failed:
            log.debug("a writer cannot be answered", writer=offer.writer, error=failed.message)
        except self._errors as failed:
            log.debug("a writer cannot be answered", writer=offer.writer, error=str(failed))
        self._answers.append(sent)

    def _ended(self) -> list[Finished]:
        """Takes out the writes that are terminal: read no more, and answered or beyond an answer."""
        finished: list[Finished] = []
        for number, write in list(self._writes.items()):
            beyond_answer = write.unsent is not None or not write.remote.endpoint.alive
            if not write.sent.complete or (write.answer is None and not beyond_answer):
                continue
            del self._writes[number]
            write.remote.outstanding -= 1
            self._close_if_idle(write.remote)
            error = (write.unsent or "it is gone") if write.answer is None else write.answer.error
            text = None if error is None else f"a write to {write.peer.name} failed: {error}"
            finished.append(Finished(write.handle, text))
        return finished

    def _close_if_idle(self, remote: _Remote) -> None:
        if remote.released and remote.outstanding == 0:
            self._hang_up(remote.endpoint)

    def _hang_up(self, endpoint: Any) -> None:
        if not endpoint.alive:
            return  # to close one whose peer is gone is a segmentation fault
        try:
            endpoint.close()
        except self._errors as error:
            log.debug("clean-up refused", error=str(error))
