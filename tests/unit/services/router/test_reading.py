"""Requests whose prompts are still being read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import DeadlineExceeded, Draining, Overloaded, RequestCancelled
from paceline.services.router import face
from paceline.services.router.prompt import PromptReader
from paceline.testing.router_bench import RouterBench, router_bench


class Gate:
    """Holds every prompt up on its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        read_prompt = PromptReader._read_prompt

        def read(*arguments: Any) -> tuple[int, ...]:
            assert self.opened.wait(10)
            return read_prompt(*arguments)

        monkeypatch.setattr(PromptReader, "_read_prompt", read)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


async def _reading(router: RouterBench, count: int) -> None:
    await router.until(active=count, queued=0)
    await asyncio.sleep(0)


async def test_an_abort_while_the_prompt_is_read_is_found_and_honoured(gate: Gate) -> None:
    async with router_bench() as router:
        asking = router.ask(request_id="mine")
        await _reading(router, 1)
        assert await router.abort("mine")
        assert isinstance(await asking.error(), RequestCancelled)
        gate.opened.set()
        await router.until(active=0, queued=0)


async def test_the_requests_time_runs_while_its_prompt_is_read(gate: Gate) -> None:
    async with router_bench() as router:
        error = await router.ask(timeout_s=0.2).error()
        assert isinstance(error, DeadlineExceeded) and "while its prompt was read" in error.message


async def test_prompts_that_are_read_at_once_are_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "_READINGS_OVER_QUEUE", 1)
    async with router_bench(queue_size=2, queue_timeout_s=0.1) as router:
        read = [router.ask() for _ in range(3)]
        await _reading(router, 3)
        error = await router.ask().error()
        assert isinstance(error, Overloaded) and error.retry_after_s > 0
        read[0].cancel()
        await _reading(router, 2)
        another = router.ask()
        await _reading(router, 3)
        for asking in (*read, another):
            asking.cancel()


async def test_what_is_read_as_the_grace_ends_is_cut_off(gate: Gate) -> None:
    async with router_bench() as router:
        asking = router.ask()
        await _reading(router, 1)
        await router.server._face.drain(grace_s=0.05)
        assert isinstance(await asking.error(), Draining)
