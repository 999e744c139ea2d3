"""Placement, a pure function."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.services.router.placement import (
    Ask,
    Choice,
    LocalPrefill,
    LocalReason,
    Policy,
    WorkerView,
    another_prefill,
    least_loaded,
    obstacle,
)
from paceline.types import Limits, Role, WorkerKey, check_lengths, longest_request

LIMITS = Limits(vocab_size=512, context_tokens=2_048, pool_blocks=100)
SMALL = Limits(vocab_size=512, context_tokens=2_048, pool_blocks=6)
SHORT = Limits(vocab_size=512, context_tokens=100, pool_blocks=100)
WINDOWED = Limits(vocab_size=512, context_tokens=2_048, pool_blocks=100, most_blocks=(None, 4, 4))
ASK = Ask(prompt_tokens=100, max_tokens=61)  # ten blocks
AUTO = Policy(prefill_slots=2)


def worker(worker_id: str, role: Role, **facts: Any) -> WorkerView:
    settings = {"fingerprint": b"f", "limits": LIMITS, "headroom_blocks": 50, **facts}
    return WorkerView(key=WorkerKey(worker_id, 1), role=role, **settings)


def p(worker_id: str = "p0", **facts: Any) -> WorkerView:
    return worker(worker_id, Role.PREFILL, **facts)


def d(worker_id: str = "d0", **facts: Any) -> WorkerView:
    return worker(worker_id, Role.DECODE, **facts)


def names(choice: Choice | None) -> tuple[str, str | None] | None:
    if choice is None:
        return None
    return choice.decode.worker_id, None if choice.prefill is None else choice.prefill.worker_id


def test_the_last_sampled_token_takes_no_room() -> None:
    assert ASK.blocks(LIMITS) == 10
    assert Ask(prompt_tokens=16, max_tokens=1).blocks(LIMITS) == 1
    assert Ask(prompt_tokens=16, max_tokens=2).blocks(LIMITS) == 2


def test_the_prompt_goes_to_the_fewest_pending_tokens_and_the_most_headroom() -> None:
    workers = [p("p0", pending_tokens=9), p("p1", pending_tokens=5), d("d0", headroom_blocks=20), d("d1")]
    assert names(least_loaded(ASK, workers, AUTO)) == ("d1", "p1")


def test_a_decode_worker_needs_room_for_the_whole_request() -> None:
    assert least_loaded(ASK, [p(), d(headroom_blocks=9)], AUTO) is None
    assert names(least_loaded(ASK, [p(), d(headroom_blocks=10)], AUTO)) == ("d0", "p0")


@pytest.mark.parametrize("out", [{"alive": False}, {"rests": True}, {"headroom_blocks": 0}])
def test_a_decode_worker_that_cannot_take_it_is_passed_over(out: dict[str, Any]) -> None:
    assert names(least_loaded(ASK, [p(), d("d0", **out), d("d1", headroom_blocks=11)], AUTO)) == ("d1", "p0")
    assert least_loaded(ASK, [p(), d("d0", **out)], AUTO) is None


@pytest.mark.parametrize("limits", [SMALL, SHORT])
def test_a_decode_worker_that_is_too_small_for_it_is_passed_over(limits: Limits) -> None:
    small = d("d0", limits=limits, headroom_blocks=99)
    assert names(least_loaded(ASK, [p(), small, d("d1")], AUTO)) == ("d1", "p0")
    assert least_loaded(ASK, [p(), small], AUTO) is None
    fitting = Ask(prompt_tokens=50, max_tokens=40)
    assert names(least_loaded(fitting, [p(), small, d("d1")], AUTO)) == ("d0", "p0")


@pytest.mark.parametrize("busy", [{"rests": True}, {"claims": 2}, {"headroom_blocks": 6}])
def test_where_prefill_workers_are_merely_busy_the_request_waits(busy: dict[str, Any]) -> None:
    assert least_loaded(ASK, [p(**busy), d()], AUTO) is None
    assert names(least_loaded(ASK, [p("p0", **busy), p("p1", pending_tokens=10**6), d()], AUTO)) == ("d0", "p1")


OUT: list[dict[str, Any]] = [
    {"alive": False},
    {"fingerprint": b"other"},
    {"unfit": frozenset({WorkerKey("d0", 1)})},
    {"limits": SMALL},
    {"limits": SHORT},
]


@pytest.mark.parametrize("out", OUT)
def test_where_no_prefill_worker_can_ever_the_decode_worker_computes(out: dict[str, Any]) -> None:
    choice = least_loaded(ASK, [p(**out), d()], AUTO)
    assert choice == Choice(decode=WorkerKey("d0", 1), local_reason=LocalReason.NO_PREFILL_WORKER)
    assert least_loaded(ASK, [p(**out), d()], Policy(local_prefill=LocalPrefill.NEVER)) is None


def test_a_short_prompt_and_a_policy_stay_on_the_decode_worker() -> None:
    short = least_loaded(ASK, [p(), d()], Policy(local_prefill_below=101))
    assert short is not None and (short.prefill, short.local_reason) == (None, LocalReason.SHORT_PROMPT)
    assert names(least_loaded(ASK, [p(), d()], Policy(local_prefill_below=100))) == ("d0", "p0")
    always = least_loaded(ASK, [p(), d()], Policy(local_prefill=LocalPrefill.ALWAYS))
    assert always is not None and (always.prefill, always.local_reason) == (None, LocalReason.POLICY)
    never = Policy(local_prefill=LocalPrefill.NEVER, local_prefill_below=101)
    assert names(least_loaded(ASK, [p(), d()], never)) == ("d0", "p0")


def test_only_equal_fingerprints_are_paired() -> None:
    workers = [p("p0", fingerprint=b"a"), p("p1", fingerprint=b"b", pending_tokens=9), d("d0", fingerprint=b"b")]
    assert names(least_loaded(ASK, workers, AUTO)) == ("d0", "p1")


def test_another_prefill_worker_matches_is_free_and_is_not_one_that_failed() -> None:
    unfit = frozenset({WorkerKey("d0", 1)})
    workers = [p("p0"), p("p1", fingerprint=b"b"), p("p2", claims=2), p("p3", pending_tokens=5), p("p4", unfit=unfit)]
    exclude = [WorkerKey("p0", 1)]
    assert another_prefill(ASK, workers, AUTO, decode=d(), exclude=exclude) == WorkerKey("p3", 1)
    exclude.append(WorkerKey("p3", 1))
    assert another_prefill(ASK, workers, AUTO, decode=d(), exclude=exclude) is None


def test_a_pair_that_turned_out_unfit_is_not_made_again() -> None:
    unfit = frozenset({WorkerKey("d0", 1)})
    workers = [p("p0", unfit=unfit), p("p1", pending_tokens=99), d("d0"), d("d1", headroom_blocks=11)]
    assert names(least_loaded(ASK, workers, AUTO)) == ("d1", "p0")
    assert names(least_loaded(ASK, [workers[0], workers[2]], AUTO)) == ("d0", None)


VIEWS = st.builds(
    WorkerView,
    key=st.builds(WorkerKey, st.sampled_from("abcdefgh"), st.integers(1, 3)),
    role=st.sampled_from(Role),
    fingerprint=st.sampled_from([b"x", b"y"]),
    limits=st.sampled_from([LIMITS, SMALL, SHORT, WINDOWED]),
    alive=st.booleans(),
    rests=st.booleans(),
    requests=st.integers(0, 5),
    pending_tokens=st.integers(0, 1_000),
    headroom_blocks=st.integers(0, 40),
    claims=st.integers(0, 3),
    unfit=st.frozensets(st.builds(WorkerKey, st.sampled_from("abcdefgh"), st.integers(1, 3)), max_size=3),
)
POLICIES = st.builds(
    Policy,
    local_prefill=st.sampled_from(LocalPrefill),
    local_prefill_below=st.integers(0, 300),
    prefill_slots=st.integers(1, 3),
)
ASKS = st.builds(Ask, prompt_tokens=st.integers(1, 300), max_tokens=st.integers(1, 300))


@given(ask=ASKS, workers=st.lists(VIEWS, max_size=8, unique_by=lambda view: view.key.worker_id), policy=POLICIES)
def test_every_choice_is_one_that_its_workers_can_take(ask: Ask, workers: list[WorkerView], policy: Policy) -> None:
    by_key = {view.key: view for view in workers}
    choice = least_loaded(ask, workers, policy)
    if choice is None:
        able = [view for view in workers if view.role is Role.DECODE and view.alive and not view.rests]
        full = all(view.headroom_blocks < ask.blocks(view.limits) or not ask.fits(view.limits) for view in able)
        assert policy.local_prefill is not LocalPrefill.ALWAYS or full
        return
    decode = by_key[choice.decode]
    assert decode.role is Role.DECODE and decode.alive and not decode.rests
    assert decode.headroom_blocks >= ask.blocks(decode.limits) and ask.fits(decode.limits)
    assert (choice.prefill is None) == (choice.local_reason is not None)
    if choice.prefill is None:
        assert policy.local_prefill is not LocalPrefill.NEVER
        return
    prefill = by_key[choice.prefill]
    assert prefill.role is Role.PREFILL and prefill.alive and not prefill.rests
    assert prefill.fingerprint == decode.fingerprint and decode.key not in prefill.unfit
    assert prefill.headroom_blocks >= ask.prompt_blocks(prefill.limits)
    assert prefill.claims < policy.prefill_slots


@given(ask=ASKS, workers=st.lists(VIEWS, max_size=8, unique_by=lambda view: view.key.worker_id), policy=POLICIES)
def test_the_order_in_which_workers_are_listed_does_not_matter(
    ask: Ask, workers: list[WorkerView], policy: Policy
) -> None:
    assert least_loaded(ask, workers, policy) == least_loaded(ask, workers[::-1], policy)


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([], "no decode worker is registered"),
        ([p()], "no decode worker is registered"),
        (
            [p(), d("d0", alive=False), d("d1", alive=False)],
            "no decode worker takes work: 2 registered, which drain, stand still or did not answer",
        ),
        ([d("d0", alive=False), d("d1")], None),
        ([d(headroom_blocks=0)], None),
        ([d(rests=True)], None),
    ],
)
def test_a_decode_worker_that_lives_is_enough_to_place_requests_however_full(
    workers: list[WorkerView], why: str | None
) -> None:
    assert obstacle(workers, AUTO) == why
    assert obstacle(workers, Policy(local_prefill=LocalPrefill.ALWAYS)) == why


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([p()], "no decode worker is registered"),
        ([d()], "no prefill worker is registered, and local_prefill is never"),
        (
            [p(alive=False), d()],
            "no prefill worker takes work: 1 registered, which drain, stand still or did not answer, "
            "and local_prefill is never",
        ),
        (
            [p(fingerprint=b"other"), d()],
            "no prefill worker can be paired with a decode worker, and local_prefill is never",
        ),
        ([p(fingerprint=b"other"), p("p1"), d()], None),
        ([p(rests=True, headroom_blocks=0), d(headroom_blocks=0)], None),
    ],
)
def test_where_decode_workers_compute_no_prompts_a_prefill_worker_that_fits_one_is_needed_too(
    workers: list[WorkerView], why: str | None
) -> None:
    assert obstacle(workers, Policy(local_prefill=LocalPrefill.NEVER)) == why


@given(
    st.lists(
        st.builds(
            worker,
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(list(Role)),
            alive=st.booleans(),
            fingerprint=st.sampled_from([b"f", b"g"]),
        ),
        max_size=4,
        unique_by=lambda view: view.key,
    ),
    st.sampled_from(list(LocalPrefill)),
)
def test_there_is_an_obstacle_exactly_where_idle_workers_would_get_nothing(
    workers: list[WorkerView], local_prefill: LocalPrefill
) -> None:
    policy = Policy(local_prefill=local_prefill)
    assert (obstacle(workers, policy) is None) is (least_loaded(ASK, workers, policy) is not None)


@pytest.mark.parametrize("limits", [LIMITS, SMALL, SHORT, WINDOWED, msgspec.structs.replace(WINDOWED, pool_blocks=20)])
def test_the_longest_request_of_a_worker_fits_it_and_one_token_more_does_not(limits: Limits) -> None:
    longest = longest_request(limits)
    assert Ask(prompt_tokens=longest - 1, max_tokens=1).fits(limits)
    assert not Ask(prompt_tokens=longest, max_tokens=1).fits(limits)
    check_lengths(longest - 1, max_tokens=1, limits=limits)
    with pytest.raises(InvalidRequest):
        check_lengths(longest, max_tokens=1, limits=limits)
