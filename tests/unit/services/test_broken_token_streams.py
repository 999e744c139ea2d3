"""A real router and a real decode front, whose token stream breaks again and again, on either side, under many
requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from paceline.protos import decode_pb2
from paceline.services.decode.front import DecodeFront
from paceline.services.decode.messages import (
    ChoiceOver,
    DecodeEvent,
    DecodeReport,
    EndRequest,
    NewTokens,
    Over,
    Reserve,
    Reserved,
)
from paceline.services.router import token_stream
from paceline.services.router.token_stream import TokenStream
from paceline.testing.decode_front import decode_front
from paceline.testing.router_bench import RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import PATIENCE_S, ScriptedDecode
from paceline.types import FinishReason, ReservationId, WorkerLoad

CHARACTERS = "abcdefghij" * 3


class Talker:
    """An engine that answers all of its requests step by step: every choice gets `CHARACTERS`, a few at a time."""

    def __init__(self, chance: random.Random) -> None:
        self.load = WorkerLoad(total_blocks=64, free_blocks=64)
        self.aborted = 0
        self.front: DecodeFront
        self._chance = chance
        self._told: dict[ReservationId, list[int]] = {}  # tokens of each choice
        self._new: list[DecodeEvent] = []

    def send(self, command: msgspec.Struct) -> None:
        if isinstance(command, Reserve):
            self._told[command.reservation_id] = [0] * command.sampling.n
            self._new.append(Reserved(reservation_id=command.reservation_id))
        elif isinstance(command, EndRequest):
            self.aborted += self._told.pop(command.reservation_id, None) is not None

    def step(self) -> None:
        events, self._new = self._new, []
        for reservation, told in list(self._told.items()):
            for choice, done in enumerate(told):
                new = CHARACTERS[done : done + self._chance.randint(0, 3)]
                if new:
                    events.append(NewTokens(reservation_id=reservation, ids=ids_of(new), index=done, choice=choice))
                    told[choice] += len(new)
                    if told[choice] == len(CHARACTERS) and len(told) > 1:
                        events.append(_choice_over(reservation, choice))
            if all(each == len(CHARACTERS) for each in told):
                del self._told[reservation]
                events.append(Over(reservation_id=reservation, finish=FinishReason.LENGTH, completion_tokens=sum(told)))
        self.front.reported(DecodeReport(load=self.load, events=tuple(events)))


def _choice_over(reservation: ReservationId, choice: int) -> ChoiceOver:
    return ChoiceOver(
        reservation_id=reservation,
        choice=choice,
        finish=FinishReason.LENGTH,
        completion_tokens=len(CHARACTERS),
    )


class Bench:
    """A router, and the front of its one worker, which steps and ends its token stream now and then."""

    def __init__(self, router: RouterBench, talker: Talker, chance: random.Random) -> None:
        self.router = router
        self.front = talker.front
        self.talker = talker
        self._chance = chance

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(0.001)
            self.talker.step()
            if self._chance.random() < 0.05:
                for stream in self.front._token_streams.values():
                    stream.end()


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(token_stream, "_REOPEN_S", (0.002,))
    chance = random.Random(7)
    pass_on = TokenStream._pass_on

    def lose_some(stream: TokenStream, message: decode_pb2.StreamTokensResponse) -> None:
        if chance.random() < 0.05:
            raise ValueError("a message that cannot be read")
        pass_on(stream, message)

    monkeypatch.setattr(TokenStream, "_pass_on", lose_some)
    talker = Talker(chance)
    async with decode_front(talker) as (front, port), router_bench() as router:
        talker.front = front
        worker = ScriptedDecode("d0", epoch=1, pool_blocks=4_096, model="dummy:tiny", dtype="float32")
        worker.port = port
        await router.register(worker)
        bench = Bench(router, talker, chance)
        running = asyncio.create_task(bench.run())
        yield bench
        running.cancel()
        await worker.die()


async def test_every_answer_is_whole_and_said_once_and_nothing_is_left(bench: Bench) -> None:
    for _ in range(10):
        asking = [bench.router.ask(max_tokens=len(CHARACTERS), n=1 + each % 2) for each in range(20)]
        for number, each in enumerate(asking):
            choices = 1 + number % 2
            for _ in range(choices):
                finish = await each.finish()
            assert finish.usage.completion_tokens == choices * len(CHARACTERS)
            for choice in range(choices):
                pieces = [piece for piece in each.pieces if piece.choice == choice]
                assert "".join(piece.text for piece in pieces) == CHARACTERS
    async with asyncio.timeout(PATIENCE_S):
        while bench.front.calls_in_hand:  # noqa: ASYNC110  # a cancelled call ends a moment later
            await asyncio.sleep(0.005)
    assert bench.talker.aborted == 0
    assert not any(stream._requests for stream in bench.front._token_streams.values())
