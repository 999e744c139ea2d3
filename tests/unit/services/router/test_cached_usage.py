"""What the router tells of caches, and what it passes on for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from paceline import wire
from paceline.services.router.placement import Ask
from paceline.testing.router_bench import RouterBench, ids_of, router_bench
from paceline.testing.scripted_workers import ScriptedDecode, ScriptedPrefill, scripted_decode, scripted_prefill
from paceline.types import GROWTH_BLOCKS, Limits, WorkerLoad


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def cluster(stack: AsyncExitStack, **settings: Any) -> tuple[RouterBench, ScriptedPrefill, ScriptedDecode]:
    prefill = await stack.enter_async_context(scripted_prefill("p0"))
    decode = await stack.enter_async_context(scripted_decode("d0"))
    router = await stack.enter_async_context(router_bench(**settings))
    await router.register(prefill, decode)
    return router, prefill, decode


async def test_priority_and_salt_reach_both_workers(stack: AsyncExitStack) -> None:
    router, on_prefill, on_decode = await cluster(stack)
    asking = router.ask(priority=-3, cache_salt="tenant 7")
    prefill, decode = await on_prefill.next_call(), await on_decode.next_call()
    for request in (prefill.request, decode.request):
        assert (request.priority, request.cache_salt) == (-3, "tenant 7")
    await decode.reserve()
    await prefill.reply(ids_of("a"))
    await decode.tokens(0, ids_of("a"))
    await decode.finish()
    await asking.finish()


async def test_the_prefill_workers_hits_are_the_cached_tokens_and_the_decode_workers_shrink_the_transfer(
    stack: AsyncExitStack,
) -> None:
    router, on_prefill, on_decode = await cluster(stack)
    asking = router.ask([5] * 100)
    prefill, decode = await on_prefill.next_call(), await on_decode.next_call()
    await decode.reserve()
    await prefill.reply(ids_of("a"), cached_tokens=48)
    await decode.tokens(0, ids_of("a"))
    await decode.finish(cached_tokens=96)
    finish = await asking.finish()
    assert (finish.usage.cached_tokens, finish.transfer.held_blocks) == (48, 6)


async def test_a_prompt_computed_on_the_decode_worker_tells_its_hits(stack: AsyncExitStack) -> None:
    router, _, on_decode = await cluster(stack, local_prefill="always")
    asking = router.ask([5] * 100)
    decode = await on_decode.next_call()
    await decode.reserve()
    await decode.tokens(0, ids_of("a"))
    await decode.finish(prompt_tokens_computed=4, cached_tokens=96)
    finish = await asking.finish()
    assert (finish.usage.cached_tokens, finish.prompt_tokens_computed_on_decode) == (96, 4)


async def test_a_salt_that_is_too_long_is_refused(stack: AsyncExitStack) -> None:
    router, _, _ = await cluster(stack)
    with pytest.raises(Exception, match="cache_salt"):
        await router.ask(cache_salt="x" * 129).finish()


def test_a_request_asks_for_its_prompt_and_a_little_of_its_answer() -> None:
    limits = Limits(vocab_size=512, context_tokens=200_000, pool_blocks=100)
    assert Ask(prompt_tokens=100, max_tokens=8).blocks(limits) == 7
    assert Ask(prompt_tokens=100, max_tokens=14).blocks(limits) == 8
    assert Ask(prompt_tokens=100, max_tokens=100_000).blocks(limits) == 7 + GROWTH_BLOCKS


def test_a_request_asks_a_worker_for_what_each_kv_group_of_the_model_takes() -> None:
    limits = Limits(vocab_size=512, context_tokens=200_000, pool_blocks=100, most_blocks=(None, 9, 9))
    short, long = Ask(prompt_tokens=100, max_tokens=8), Ask(prompt_tokens=1_600, max_tokens=100_000)
    assert (short.prompt_blocks(limits), short.blocks(limits)) == (3 * 7, 3 * 7)
    assert (long.prompt_blocks(limits), long.blocks(limits)) == (100 + 18, 100 + GROWTH_BLOCKS + 18)


@pytest.mark.parametrize(
    ("committed", "kept", "headroom"),
    [
        (0, 0, 100),
        (0, 8, 100),  # a lone request may have all
        (10, 8, 82),
        (95, 8, 0),
        (0, 100, 0),  # somebody waits for blocks
        (40, 100, 0),
    ],
)
def test_a_worker_keeps_blocks_from_new_requests(committed: int, kept: int, headroom: int) -> None:
    load = WorkerLoad(total_blocks=100, committed_blocks=committed, kept_blocks=kept)
    assert load.headroom_blocks == headroom
    assert wire.load_from_proto(wire.load_to_proto(load)) == load
