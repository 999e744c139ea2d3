from __future__ import annotations

from typing import Any

import pytest

from paceline.loadtest.config import Slo
from paceline.loadtest.outcome import Outcome, Served
from paceline.loadtest.statistics import Distribution
from paceline.loadtest.summary import is_good, summarise


def outcome(sent_s: float, *arrivals_s: float, index: int = 0, **fields: Any) -> Outcome:
    """Answered with a token at each moment, and ended with the last."""
    values: dict[str, Any] = {
        "scheduled_s": None,
        "ended_s": arrivals_s[-1] if arrivals_s else sent_s,
        "tokens": [1] * len(arrivals_s),
        "input_tokens": 10,
        "asked_tokens": len(arrivals_s),
    }
    values |= fields
    values.setdefault("output_tokens", sum(values["tokens"]))
    return Outcome(index=index, sent_s=sent_s, arrivals_s=list(arrivals_s), **values)


def served(**fields: Any) -> Served:
    values: dict[str, Any] = {
        "queued_s": 0.0,
        "prefill_s": 0.5,
        "first_token_s": 0.6,
        "bytes": 4096,
        "blocks": 2,
        "held_blocks": 0,
        "transfer_s": 0.0,
        "parts": 1,
        "attempts": 1,
        "computed_on_decode": 0,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    return Served(**(values | fields))


def test_latencies_are_read_from_the_stamps() -> None:
    one = outcome(1.0, 1.5, 1.6, 1.8, ended_s=1.9, scheduled_s=0.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.itl_s == pytest.approx([0.1, 0.2])
    assert one.tpot_s == pytest.approx(0.15)
    assert one.e2e_s == pytest.approx(0.9)
    assert one.lateness_s == pytest.approx(0.1)


def test_a_message_of_several_tokens_is_one_gap_and_counts_in_full_per_token() -> None:
    one = outcome(0.0, 1.0, 3.0, tokens=[1, 4])
    assert one.itl_s == [2.0]
    assert one.tpot_s == pytest.approx(0.5)
    assert summarise([one]).tokens_per_message == 2.5


def test_what_has_no_second_token_has_no_gap_and_no_time_per_token() -> None:
    assert (outcome(0.0, 1.0).itl_s, outcome(0.0, 1.0).tpot_s) == ([], None)
    assert outcome(0.0).ttft_s is None


def test_gaps_of_all_requests_are_taken_together() -> None:
    summary = summarise([outcome(0.0, 1.0, 2.0), outcome(0.0, 1.0, 4.0, 9.0)])
    assert summary.itl_s == Distribution(count=3, mean=3.0, p50=3.0, p90=4.6, p99=4.96, max=5.0)


def test_failed_requests_are_counted_by_reason_and_are_in_no_latency() -> None:
    lost = {"error": "WORKER_LOST", "message": "decode-0 is gone"}
    summary = summarise(
        [outcome(0.0, 1.0, 2.0), outcome(0.0, 9.0, **lost), outcome(0.0, **lost), outcome(0.0, error="X")]
    )
    assert (summary.sent, summary.succeeded) == (4, 1)
    assert summary.errors == {"WORKER_LOST": 2, "X": 1}
    assert summary.first_errors["WORKER_LOST"] == "decode-0 is gone"
    assert summary.ttft_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.max) == (1, 1.0)
    assert (summary.input_tokens, summary.output_tokens) == (10, 2)


def test_throughput_is_over_the_time_from_the_first_sending_to_the_last_end() -> None:
    whole = summarise([outcome(1.0, 2.0, 3.0), outcome(2.0, 4.0, 5.0, ended_s=6.0)]).whole
    assert (whole.seconds, whole.output_tokens, whole.requests) == (5.0, 4, 2)
    assert (whole.tokens_per_s, whole.requests_per_s) == (0.8, 0.4)


def test_steady_state_is_from_the_first_end_to_the_last_sending() -> None:
    first = outcome(0.0, 1.0, 2.0)
    second = outcome(0.0, 1.0, 3.0, 4.0)
    third = outcome(4.0, 5.0, 6.0)
    steady = summarise([first, second, third]).steady
    assert steady is not None
    assert (steady.from_s, steady.to_s) == (2.0, 4.0)
    assert (steady.output_tokens, steady.requests) == (3, 2), "the tokens at 2, 3 and 4; the ends at 2 and 4"


def test_all_at_once_has_no_steady_state() -> None:
    assert summarise([outcome(0.0, 1.0), outcome(0.1, 1.0)]).steady is None


@pytest.mark.parametrize(
    ("answered", "good"),
    [
        (outcome(0.0, 0.5, 0.6, 0.7), True),
        (outcome(0.0, 0.51, 0.6, 0.7), False),
        (outcome(0.0, 0.5, 0.6, 0.81), False),
        (outcome(0.0, 0.5), True),
        (outcome(0.0, 0.5, 0.6, error="WORKER_LOST"), False),
        (outcome(0.0), False),
    ],
    ids=["within", "first token late", "gaps too long", "a single token", "failed", "nothing came"],
)
def test_a_good_request_keeps_both_limits(answered: Outcome, good: bool) -> None:
    assert is_good(answered, Slo(ttft_s=0.5, itl_s=0.2)) is good


def test_one_long_gap_in_two_hundred_is_borne_and_three_are_not() -> None:
    def with_long_gaps(count: int) -> Outcome:
        moments = [0.1]
        for gap in range(200):
            moments.append(moments[-1] + (1.0 if gap < count else 0.01))
        return outcome(0.0, *moments)

    slo = Slo(ttft_s=None, itl_s=0.5)
    assert [is_good(with_long_gaps(count), slo) for count in (0, 1, 3)] == [True, True, False]


def test_goodput_counts_good_requests_over_the_whole_time() -> None:
    goodput = summarise([outcome(0.0, 0.4), outcome(0.0, 1.0, ended_s=4.0)], Slo(ttft_s=0.5, itl_s=None)).goodput
    assert goodput is not None
    assert (goodput.good, goodput.share, goodput.requests_per_s) == (1, 0.5, 0.25)


def test_hand_overs_are_summed_up() -> None:
    moved = outcome(0.0, 1.0, served=served(parts=3, transfer_s=0.2, attempts=2, held_blocks=5), cached_tokens=3)
    local = served(prefill_worker=None, computed_on_decode=10, blocks=0, bytes=0)
    summary = summarise([moved, outcome(0.0, 1.0, served=local)])
    found = summary.handovers
    assert found is not None
    assert (found.through_prefill, found.computed_on_decode, found.tokens_computed_on_decode) == (1, 1, 10)
    assert (found.bytes, found.blocks, found.held_blocks, found.retried) == (4096, 2, 5, 1)
    assert found.transfer_s is not None
    assert found.prefill_s is not None
    assert (found.transfer_s.p50, found.prefill_s.count, summary.cached_tokens) == (0.2, 1, 3)
    assert summarise([outcome(0.0, 1.0)]).handovers is None
