"""The figures of a run, made of its outcomes. Pure: times in seconds, rates a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.loadtest.config import Slo
from paceline.loadtest.outcome import STOPPED, Outcome
from paceline.loadtest.statistics import Distribution, percentile

SLO_PERCENT = 99.0
"""The percentile of a request's own inter-token latencies that its SLO bounds."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What came out in a window of the run."""

    from_s: float
    to_s: float
    output_tokens: int
    requests: int  # that ended well in it

    @property
    def seconds(self) -> float:
        """The window's length."""
        return self.to_s - self.from_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers."""
        return self.output_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Answered requests."""
        return self.requests / self.seconds


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How many requests kept the SLO."""

    slo: Slo
    good: int
    share: float  # of all but those that the run itself stopped; one that failed is not good
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class Handovers:
    """How routers say that prompts were computed and their KV moved, summed up over the requests that ended well."""

    through_prefill: int  # requests whose prompt a prefill worker computed
    computed_on_decode: int  # requests some of whose prompt the decode worker computed
    tokens_computed_on_decode: int
    retried: int  # requests that took more than one attempt
    bytes: int
    blocks: int
    held_blocks: int
    transfer_s: Distribution | None  # of those that came in more than one part
    queued_s: Distribution | None
    prefill_s: Distribution | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run. Latencies are of requests that ended well."""

    sent: int
    succeeded: int
    stopped: int  # by the run itself: neither answered nor failed
    errors: dict[str, int]  # by reason
    first_errors: dict[str, str]  # what the first of each reason said
    whole: Throughput  # from the first sending to the last end
    steady: Throughput | None  # without ramp-up and cool-down
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_message: float | None
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    lateness_s: Distribution | None
    goodput: Goodput | None
    handovers: Handovers | None


def summarise(outcomes: Sequence[Outcome], slo: Slo | None = None) -> Summary:
    """The figures of at least one outcome."""
    assert outcomes
    done = [outcome for outcome in outcomes if outcome.error is None]
    messages = sum(len(outcome.arrivals_s) for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    whole = _whole(outcomes)
    first_errors: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            first_errors.setdefault(outcome.error, outcome.message)
    return Summary(
        sent=len(outcomes),
        succeeded=len(done),
        stopped=sum(outcome.error == STOPPED for outcome in outcomes),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        first_errors=first_errors,
        whole=whole,
        steady=_steady(outcomes),
        input_tokens=sum(outcome.input_tokens for outcome in done),
        cached_tokens=sum(outcome.cached_tokens for outcome in done),
        output_tokens=output_tokens,
        tokens_per_message=output_tokens / messages if messages else None,
        ttft_s=Distribution.of(outcome.ttft_s for outcome in done if outcome.ttft_s is not None),
        itl_s=Distribution.of(gap for outcome in done for gap in outcome.itl_s),
        tpot_s=Distribution.of(outcome.tpot_s for outcome in done if outcome.tpot_s is not None),
        e2e_s=Distribution.of(outcome.e2e_s for outcome in done),
        lateness_s=Distribution.of(late for outcome in outcomes if (late := outcome.lateness_s) is not None),
        goodput=None if slo is None else _goodput(outcomes, slo, whole),
        handovers=_handovers(done),
    )


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """True where the request ended well, and its first token and the p99 of its own gaps kept the limits.

    An answer of one message has no gap, and keeps any limit on gaps.
    """
    if outcome.error is not None or outcome.ttft_s is None:
        return False
    if slo.ttft_s is not None and outcome.ttft_s > slo.ttft_s:
        return False
    gaps = outcome.itl_s
    return slo.itl_s is None or not gaps or percentile(sorted(gaps), SLO_PERCENT) <= slo.itl_s


def _whole(outcomes: Sequence[Outcome]) -> Throughput:
    begin, end = min(outcome.sent_s for outcome in outcomes), max(outcome.ended_s for outcome in outcomes)
    return _throughput(outcomes, begin, max(end, begin + 1e-9))


def _steady(outcomes: Sequence[Outcome]) -> Throughput | None:
    """From the first end of a request to the last sending of one: all places are taken, and none is being emptied.

    None where the last is sent before the first ends, as when all are sent at once: then there is no steady state.
    """
    begin, end = min(outcome.ended_s for outcome in outcomes), max(outcome.sent_s for outcome in outcomes)
    return _throughput(outcomes, begin, end) if begin < end else None


def _throughput(outcomes: Iterable[Outcome], begin: float, end: float) -> Throughput:
    tokens = requests = 0
    for outcome in outcomes:
        tokens += sum(count for at, count in zip(outcome.arrivals_s, outcome.tokens, strict=True) if begin <= at <= end)
        requests += outcome.error is None and begin <= outcome.ended_s <= end
    return Throughput(from_s=begin, to_s=end, output_tokens=tokens, requests=requests)


def _goodput(outcomes: Sequence[Outcome], slo: Slo, whole: Throughput) -> Goodput:
    good = sum(is_good(outcome, slo) for outcome in outcomes)
    judged = sum(outcome.error != STOPPED for outcome in outcomes)
    return Goodput(slo=slo, good=good, share=good / max(1, judged), requests_per_s=good / whole.seconds)


def _handovers(done: Sequence[Outcome]) -> Handovers | None:
    served = [outcome.served for outcome in done if outcome.served is not None]
    if not served:
        return None
    return Handovers(
        through_prefill=sum(each.prefill_worker is not None for each in served),
        computed_on_decode=sum(each.computed_on_decode > 0 for each in served),
        tokens_computed_on_decode=sum(each.computed_on_decode for each in served),
        retried=sum(each.attempts > 1 for each in served),
        bytes=sum(each.bytes for each in served),
        blocks=sum(each.blocks for each in served),
        held_blocks=sum(each.held_blocks for each in served),
        transfer_s=Distribution.of(each.transfer_s for each in served if each.parts > 1),
        queued_s=Distribution.of(each.queued_s for each in served),
        prefill_s=Distribution.of(each.prefill_s for each in served if each.prefill_worker is not None),
    )
