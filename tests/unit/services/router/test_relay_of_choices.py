"""Several choices of one request through the router, over real gRPC, between scripted workers."""

from __future__ import annotations

import asyncio

from paceline import wire
from paceline.errors import EngineLost, InvalidRequest, WorkerLost
from paceline.protos import router_pb2
from paceline.testing.router_bench import Asking, ids_of, router_bench
from paceline.testing.scripted_workers import PATIENCE_S, scripted_decode, scripted_prefill
from paceline.types import FinishReason


async def whole(asking: Asking, choices: int) -> dict[int, str]:
    """Reads until every choice has ended; each one's text."""
    ended = 0
    while ended < choices:
        ended += (await asking.piece()).HasField("finish")
    return {choice: "".join(p.text for p in asking.pieces if p.choice == choice) for choice in range(choices)}


def finish_of(asking: Asking, choice: int) -> router_pb2.Finish:
    [finish] = [piece.finish for piece in asking.pieces if piece.choice == choice and piece.HasField("finish")]
    return finish


async def test_choices_come_apart_and_usage_sums_them() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask(n=2)
        first, stream = await prefill.next_call(), await decode.next_call()
        assert first.request.sampling.n == stream.request.sampling.n == 2
        await stream.reserve()
        await first.reply(ids_of("ax"))  # the first token of each choice
        await stream.tokens(0, ids_of("a"))
        await stream.tokens(0, ids_of("x"), choice=1)
        await stream.tokens(1, ids_of("yz"), choice=1)
        await stream.finish_choice(1, FinishReason.STOP)
        await stream.tokens(1, ids_of("b"))
        await stream.finish_choice(0)
        await stream.finish()
        assert await whole(asking, 2) == {0: "ab", 1: "xyz"}
        early, last = finish_of(asking, 1), finish_of(asking, 0)
        assert wire.finish_from_proto(early.reason) is FinishReason.STOP
        assert early.usage.completion_tokens == 3
        assert wire.finish_from_proto(last.reason) is FinishReason.LENGTH
        assert last.usage.completion_tokens == 5
        assert asking.pieces[-1].choice == 0


async def test_a_stop_string_ends_one_choice_here_and_on_its_worker_alone() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask(n=2, stop=["!"])
        first, stream = await prefill.next_call(), await decode.next_call()
        await stream.reserve()
        await first.reply(ids_of("ax"))
        await stream.tokens(1, ids_of("!"))
        async with asyncio.timeout(PATIENCE_S):
            assert await decode.aborted_choices.get() == 0
        await stream.finish_choice(0, FinishReason.CANCELLED)
        await stream.tokens(1, ids_of("y"), choice=1)
        await stream.finish_choice(1)
        await stream.finish()
        assert await whole(asking, 2) == {0: "a", 1: "xy"}
        assert finish_of(asking, 0).stop_text == "!"
        assert decode.aborted.empty()


async def test_the_best_choice_alone_is_answered_when_all_have_ended() -> None:
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        asking = router.ask(best_of=2)
        stream = await decode.next_call()
        assert (stream.request.sampling.n, stream.request.sampling.logprobs) == (2, 0)
        await stream.reserve()
        await stream.tokens(0, ids_of("a"), logprobs=[-3.0])
        await stream.tokens(0, ids_of("xy"), choice=1, logprobs=[-0.5, -0.5])
        for choice in (1, 0):
            await stream.finish_choice(choice)
        await stream.finish()
        assert await whole(asking, 1) == {0: "xy"}
        assert finish_of(asking, 0).usage.completion_tokens == 3
        assert not any(piece.logprobs for piece in asking.pieces)


async def test_the_best_choice_is_sought_again_where_its_decode_worker_dies_midway() -> None:
    """Nothing has left by then, and nothing of the first try is in the answer: the second one's words may differ."""
    async with scripted_decode("d0") as first, scripted_decode("d1") as second, router_bench() as router:
        await router.register(first)
        asking = router.ask(best_of=2)
        stream = await first.next_call()
        await stream.reserve()
        await stream.tokens(0, ids_of("abc"), logprobs=[-0.1, -0.1, -0.1])
        await stream.tokens(0, ids_of("xy"), choice=1, logprobs=[-3.0, -3.0])
        await stream.finish_choice(0)
        await router.register(second)
        await first.die()
        again = await second.next_call()
        await again.reserve()
        await again.tokens(0, ids_of("q"), logprobs=[-2.0])
        await again.tokens(0, ids_of("z"), choice=1, logprobs=[-1.0])
        for choice in (0, 1):
            await again.finish_choice(choice)
        await again.finish()
        assert await whole(asking, 1) == {0: "z"}
        finish = finish_of(asking, 0)
        assert finish.usage.completion_tokens == 2
        assert finish.decode_worker.worker_id == "d1"


async def test_a_search_is_answered_when_it_is_over_and_not_with_what_prefill_proposes() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask("abc", n=2, beam_width=4, logprobs=0, prompt_logprobs=0)
        first, stream = await prefill.next_call(), await decode.next_call()
        for sampling in (first.request.sampling, stream.request.sampling):
            assert (sampling.n, sampling.beam_width, sampling.temperature) == (2, 4, 0.0)
        await stream.reserve()
        await first.reply(ids_of("abcdefgh"), prompt_logprobs=[-1.0, -2.0])
        await stream.tokens(0, ids_of("xyz"), logprobs=[-0.5, -0.25, -0.25])
        await stream.tokens(0, ids_of("q"), choice=1, logprobs=[-3.0])
        await stream.finish_choice(0)
        await stream.finish_choice(1, FinishReason.STOP)
        await stream.finish()
        assert await whole(asking, 2) == {0: "xyz", 1: "q"}
        assert [finish_of(asking, choice).cumulative_logprob for choice in (0, 1)] == [-1.0, -3.0]
        assert [score.logprob for score in asking.pieces[0].prompt_logprobs] == [-1.0, -2.0]


async def test_a_cumulative_log_probability_is_told_where_log_probabilities_are() -> None:
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        for asked in ({"logprobs": 0}, {}):
            asking = router.ask(best_of=2, **asked)
            stream = await decode.next_call()
            await stream.reserve()
            for choice in (0, 1):
                await stream.tokens(0, ids_of("ab"), choice=choice, logprobs=[-0.5, -0.25 - choice])
                await stream.finish_choice(choice)
            await stream.finish()
            finish = await asking.finish()
            assert finish.HasField("cumulative_logprob") == bool(asked)
            assert finish.cumulative_logprob == (-0.75 if asked else 0.0)


async def test_a_search_whose_decode_worker_dies_midway_is_done_elsewhere() -> None:
    """However far it had come, and though prefill had replied: nothing was sent."""
    async with (
        scripted_prefill("p0") as prefill,
        scripted_decode("d0") as lost,
        scripted_decode("d1") as decode,
        router_bench() as router,
    ):
        await router.register(prefill, lost)
        asking = router.ask(beam_width=4)
        first, stream = await prefill.next_call(), await lost.next_call()
        await stream.reserve()
        await first.reply(ids_of("abcdefgh"))
        await router.register(decode)
        await lost.die()
        again, stream = await prefill.next_call(), await decode.next_call()
        await stream.reserve()
        await again.reply(ids_of("abcdefgh"))
        await stream.tokens(0, ids_of("xy"))
        await stream.finish()
        assert await whole(asking, 1) == {0: "xy"}


async def test_stop_strings_are_refused_with_a_beam_search() -> None:
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        error = await router.ask(beam_width=2, stop=["end"]).error()
        assert isinstance(error, InvalidRequest)
        assert "'end' cannot be had with beam_width" in error.message


async def test_an_answer_that_ends_before_its_prompts_log_probabilities_came_waits_for_them() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask("abc", prompt_logprobs=0)
        first, stream = await prefill.next_call(), await decode.next_call()
        await stream.reserve()
        await stream.tokens(0, ids_of("xy"))
        await stream.finish()
        await asyncio.sleep(0.4)  # longer than the reply of any other request is waited for
        await first.reply(ids_of("x"), prompt_logprobs=[-1.0, -2.0])
        assert await whole(asking, 1) == {0: "xy"}
        assert [score.logprob for score in asking.pieces[0].prompt_logprobs] == [-1.0, -2.0]
        assert sum(len(piece.prompt_logprobs) for piece in asking.pieces) == 2


async def test_a_prompts_log_probabilities_that_are_lost_are_an_error_and_no_silence() -> None:
    async with scripted_prefill("p0") as prefill, scripted_decode("d0") as decode, router_bench() as router:
        await router.register(prefill, decode)
        asking = router.ask("abc", prompt_logprobs=0)
        first, stream = await prefill.next_call(), await decode.next_call()
        await stream.reserve()
        await stream.tokens(0, ids_of("xy"))
        await stream.finish()
        await first.fail(EngineLost("died"))
        assert isinstance(await asking.error(), WorkerLost)


async def test_logprobs_carry_the_texts_of_their_tokens_to_the_client() -> None:
    """Control tokens too, and parts of characters as far as they are text."""
    async with scripted_decode("d0") as decode, router_bench() as router:
        await router.register(decode)
        asking = router.ask(logprobs=1, ignore_eos=True)
        stream = await decode.next_call()
        await stream.reserve()
        ids = [*ids_of("a "), 2, *ids_of("é")]
        await stream.tokens(0, ids, logprobs=[-0.5] * len(ids))
        await stream.finish()
        await asking.finish()
        said = [each for piece in asking.pieces for each in piece.logprobs]
        assert [each.text for each in said] == ["a", " ", "</s>", "\ufffd", "\ufffd"]
