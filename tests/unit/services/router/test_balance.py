"""The estimate of how many workers of each tier suit the requests of late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.convert import loads_from_proto
from paceline.protos import router_pb2
from paceline.services.router.balance import SECONDS, Balance, MeanRequest, Pace, balance
from paceline.services.router.face import balance_to_proto
from paceline.testing.router_bench import ids_of, router_bench
from paceline.testing.scripted_workers import scripted_decode, scripted_prefill
from paceline.types import Limits, Role, Work

LIMITS = Limits(vocab_size=512, context_tokens=10_000, pool_blocks=7_200, batch_requests=256)
STEP_S, PER_REQUEST_S = 4e-3, 50e-6

# 8B shapes in bfloat16 within a sixth of an H200.
LARGE = Limits(
    vocab_size=128_256,
    context_tokens=131_072,
    pool_blocks=7_829,
    batch_requests=256,
    step_weight_bytes=16_100_000_000 - 1_050_000_000,
    block_bytes=2 * 2**20,
)
WINDOWED = msgspec.structs.replace(LARGE, windows=(None, 512, 512))


def mean(prompt_tokens: int = 1_024, generated_tokens: int = 128, cached_tokens: int = 0) -> MeanRequest:
    request = MeanRequest()
    request.take(prompt_tokens=prompt_tokens, generated_tokens=generated_tokens, cached_tokens=cached_tokens, now=0.0)
    return request


def prefill(tokens_per_s: int = 40_000) -> Pace:
    pace = Pace(Work())
    pace.take(Work(busy_s=2.0, steps=80, prompt_tokens=2 * tokens_per_s, generated_tokens=80), now=0.0)
    return pace


def decode(*batches: int, prompt_tokens: int = 0) -> Pace:
    """100 steps at each batch."""
    pace, busy_s, steps, generated = Pace(Work()), 0.0, 0, 0
    for number, batch in enumerate(batches, 1):
        busy_s, steps = busy_s + 100 * (STEP_S + PER_REQUEST_S * batch), steps + 100
        generated += 100 * batch
        work = Work(busy_s=busy_s, steps=steps, prompt_tokens=number * prompt_tokens, generated_tokens=generated)
        pace.take(work, now=0.0)
    return pace


def estimate(*paces: tuple[Role, Pace], request: MeanRequest | None = None, limits: Limits = LIMITS) -> Balance | None:
    return balance(request or mean(), [(role, limits, pace) for role, pace in paces])


def test_nothing_is_said_before_both_tiers_have_worked_and_a_request_has_ended() -> None:
    both = ((Role.PREFILL, prefill()), (Role.DECODE, decode(1, 8)))
    assert estimate(*both) is not None
    assert estimate(both[0]) is None
    assert estimate(both[1]) is None
    assert estimate(*both, request=MeanRequest()) is None
    assert estimate(both[0], (Role.DECODE, Pace(Work()))) is None
    assert estimate((Role.PREFILL, Pace(Work())), both[1]) is None


def test_the_rate_of_a_full_decode_worker_is_read_off_the_line_through_smaller_batches() -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(2, 10, 30)))
    assert found is not None
    assert found.batch_requests == 100  # 7,200 blocks over the 72 of a request of 1,152 tokens
    assert found.step_s == pytest.approx(STEP_S)
    assert found.step_per_request_s == pytest.approx(PER_REQUEST_S)
    assert found.decode_tokens_per_s == pytest.approx(100 / (STEP_S + 100 * PER_REQUEST_S))
    assert found.prefill_tokens_per_s == pytest.approx(40_000)
    assert found.prefill_per_decode == pytest.approx((100 / 9e-3 / 128) / (40_000 / 1_024))


def test_a_batch_is_no_larger_than_a_step_takes() -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(2, 30)), request=mean(16, 16))
    assert found is not None and found.batch_requests == 256


def test_batches_that_were_all_alike_speak_for_themselves_alone() -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(20, 20, 20)))
    assert found is not None
    assert found.batch_requests == pytest.approx(20)
    assert found.decode_tokens_per_s == pytest.approx(20 / (STEP_S + 20 * PER_REQUEST_S))


def alone(seconds: float = 15.15e-3) -> Pace:
    """100 steps, each with one request."""
    pace = Pace(Work())
    pace.take(Work(busy_s=100 * seconds, steps=100, generated_tokens=100), now=0.0)
    return pace


def test_a_decode_worker_that_had_one_request_at_a_time_is_not_taken_to_be_slow(bench: Callable[[str], Any]) -> None:
    paces = (Role.PREFILL, prefill(6_770)), (Role.DECODE, alone())
    found = estimate(*paces, request=mean(8_192, 64), limits=LARGE)
    assert found is not None
    assert found.step_s + found.step_per_request_s == pytest.approx(15.15e-3)
    assert found.step_per_request_s == pytest.approx(15.15e-3 * 0.0668, rel=1e-2)  # 1.08 GB of 16.1 read
    assert found.batch_requests == pytest.approx(7_829 / 516)
    assert found.decode_tokens_per_s == pytest.approx(514, rel=1e-2)
    best_split = bench("scaling_laws").best_split
    assert str(best_split(found, 4)) == "3P1D"
    untold = msgspec.structs.replace(LARGE, step_weight_bytes=0, block_bytes=0)  # by an older worker
    found = estimate(*paces, request=mean(8_192, 64), limits=untold)
    assert found is not None and found.batch_requests == 1
    assert found.decode_tokens_per_s == pytest.approx(66, rel=1e-2)
    assert str(best_split(found, 4)) == "2P2D"


@pytest.mark.parametrize(
    ("limits", "request_", "context"),
    [
        (LARGE, mean(8_192, 64), 8_192 + 32),
        (LARGE, mean(8_192, 64, cached_tokens=8_000), 8_192 + 32),
        (WINDOWED, mean(8_192, 64), 8_192 + 32 + 2 * 512),
        (WINDOWED, mean(256, 64), 3 * (256 + 32)),
    ],
    ids=["prompt and half of the answer", "what was cached too", "windows", "windows that are not full"],
)
def test_a_request_adds_what_reading_its_kv_takes(limits: Limits, request_: MeanRequest, context: int) -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, alone()), request=request_, limits=limits)
    assert found is not None
    share = context * limits.block_bytes / 16 / limits.step_weight_bytes
    assert found.step_per_request_s / found.step_s == pytest.approx(share)


@pytest.mark.parametrize("limits", [LARGE, msgspec.structs.replace(LARGE, block_bytes=LARGE.block_bytes * 100)])
def test_a_line_through_batches_that_differ_counts_for_more_than_bytes(limits: Limits) -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(2, 10, 30)), limits=limits)
    assert found is not None
    assert found.step_per_request_s == pytest.approx(PER_REQUEST_S, rel=0.05)


def test_the_more_batches_differ_the_less_bytes_count() -> None:
    spread = [(20, 20), (19, 21), (18, 22), (17, 23), (10, 30)]
    added = []
    for batches in spread:
        found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(*batches)), limits=LARGE)
        assert found is not None
        added.append(found.step_per_request_s)
    by_bytes = 5e-3 / (LARGE.step_weight_bytes / (1_088 * LARGE.block_bytes / 16) + 20)
    assert added[0] == pytest.approx(by_bytes)
    assert added == sorted(added, key=lambda slope: abs(slope - PER_REQUEST_S), reverse=True)
    assert added[-1] == pytest.approx(PER_REQUEST_S, rel=0.01)


def test_a_worker_that_tells_what_a_step_reads_tells_it_for_an_older_one_of_its_tier() -> None:
    untold = msgspec.structs.replace(LARGE, step_weight_bytes=0, block_bytes=0)
    workers = [(Role.PREFILL, untold, prefill()), (Role.DECODE, untold, alone()), (Role.DECODE, LARGE, Pace(Work()))]
    found = balance(mean(8_192, 64), workers)
    assert found == estimate((Role.PREFILL, prefill()), (Role.DECODE, alone()), request=mean(8_192, 64), limits=LARGE)


def test_the_workers_of_a_tier_are_averaged() -> None:
    several = estimate(
        (Role.PREFILL, prefill(30_000)),
        (Role.PREFILL, prefill(50_000)),
        (Role.DECODE, decode(2, 30)),
        (Role.DECODE, decode(5, 60)),
    )
    assert several is not None
    assert several.prefill_tokens_per_s == pytest.approx(40_000)
    assert several.step_per_request_s == pytest.approx(PER_REQUEST_S)


def test_steps_that_compute_prompts_tell_nothing_of_decoding() -> None:
    assert estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(2, 30, prompt_tokens=512))) is None


def test_a_report_that_comes_late_or_twice_counts_for_nothing() -> None:
    pace = Pace(Work())
    first, second = (Work(busy_s=n * 1.0, steps=n * 10, prompt_tokens=n * 100) for n in (1, 2))
    for work in (second, first, second):
        pace.take(work, now=0.0)
    assert pace.prompts == (2.0, 200)


def test_only_the_latest_seconds_count_in_which_anything_came_however_long_ago() -> None:
    request, pace = mean(10_000, 10), prefill(1_000)
    for n in range(1, SECONDS + 1):
        now = 100.0 * n
        request.take(prompt_tokens=100, generated_tokens=50, now=now)
        request.take(prompt_tokens=300, generated_tokens=50, now=now + 0.5)
        pace.take(Work(busy_s=2.0 + n, steps=80 + n, prompt_tokens=2_000 + 40_000 * n), now=now)
    assert request.tokens == (200, 0, 50)
    assert pace.prompts == (SECONDS, 40_000 * SECONDS)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 500), st.floats(1e-5, 10.0), st.integers(0, 1_000)), min_size=1
    ),
    st.sampled_from([LIMITS, LARGE, WINDOWED, msgspec.structs.replace(LARGE, step_weight_bytes=1)]),
)
def test_whatever_is_reported_rates_are_positive_and_finite(
    reports: list[tuple[int, int, float, int]], limits: Limits
) -> None:
    pace, work = Pace(Work()), Work()
    for steps, batch, busy_s, prompt_tokens in reports:
        work = Work(
            busy_s=work.busy_s + busy_s,
            steps=work.steps + steps,
            generated_tokens=work.generated_tokens + steps * batch,
            prompt_tokens=work.prompt_tokens + prompt_tokens,
        )
        pace.take(work, now=0.0)
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, pace), limits=limits)
    if found is not None:
        assert 0 < found.decode_tokens_per_s < float("inf")
        assert 0 < found.prefill_per_decode < float("inf")
        assert found.step_s >= -1e-9 and found.step_per_request_s >= 0


def test_the_estimate_reaches_the_client_as_it_is() -> None:
    found = estimate((Role.PREFILL, prefill()), (Role.DECODE, decode(2, 30)))
    assert found is not None
    told = loads_from_proto(router_pb2.RouterGetLoadsResponse(balance=balance_to_proto(found))).balance
    assert told is not None
    assert told.prefill_per_decode == pytest.approx(found.prefill_per_decode)
    assert told.step_per_request_s == pytest.approx(PER_REQUEST_S)
    assert (told.batch_requests, told.prompt_tokens, told.generated_tokens) == (100, 1_024, 128)


async def test_a_router_reckons_with_the_requests_it_served_and_the_work_its_workers_report() -> None:
    async with scripted_prefill("p0") as first, scripted_decode("d0") as second, router_bench() as router:
        await router.register(first, second)
        asking = router.ask([5] * 40)
        on_prefill, on_decode = await first.next_call(), await second.next_call()
        await on_decode.reserve()
        await on_prefill.reply(ids_of("a"))
        await on_decode.tokens(0, ids_of("ab"))
        await on_decode.finish()
        await asking.finish()
        assert not (await router.loads()).HasField("balance")
        computed = Work(busy_s=1.0, steps=5, prompt_tokens=4_000)
        await router.heartbeat(first, load=msgspec.structs.replace(first.load, work=computed))
        for number, generated in enumerate((100, 1_000), 1):
            decoded = Work(busy_s=number, steps=100 * number, generated_tokens=generated)
            await router.heartbeat(second, load=msgspec.structs.replace(second.load, work=decoded))
        found = (await router.loads()).balance
        assert (found.prompt_tokens, found.generated_tokens) == (40, 2)
        assert found.prefill_tokens_per_second == pytest.approx(4_000)
        assert found.prefill_per_decode > 0
