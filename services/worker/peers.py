"""Channels to workers of the other tier, one for each of their lives."""

from __future__ import annotations

import asyncio

import grpc

from paceline import wire
from paceline.services.worker.registration import PeerInfo
from paceline.types import WorkerKey


class PeerChannels:
    """Opens channels on demand, and closes those of replaced lives."""

    def __init__(self) -> None:
        self._channels: dict[WorkerKey, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, peer: PeerInfo) -> grpc.aio.Channel:
        """The channel to this life of the peer."""
        channel = self._channels.get(peer.key)
        if channel is None:
            channel = grpc.aio.insecure_channel(peer.address, options=wire.CHANNEL_OPTIONS)
            self._channels[peer.key] = channel
        return channel

    def replaced(self, by: WorkerKey) -> None:
        """Closes the channels to earlier lives of the same worker; calls on them fail."""
        for key in [key for key in self._channels if key.worker_id == by.worker_id and key.epoch < by.epoch]:
            task = asyncio.create_task(self._channels.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), *self._closing)
        self._channels.clear()
