"""What no service may serve, sent to each of them next to a good stream."""

from __future__ import annotations

import grpc
import pytest

from paceline import wire
from paceline.testing.cluster import Cluster
from paceline.testing.hostile import Case, router_cases
from paceline.testing.hostile_workers import (
    Tiers,
    claim_tokens,
    decode_cases,
    misfit_claims,
    prefill_cases,
    prefill_for_nothing,
)
from paceline.testing.traffic import Traffic

pytestmark = pytest.mark.cluster


def test_bad_requests_get_their_error_and_a_good_stream_beside_them_its_tokens() -> None:
    """F05, F06, F07, F19, F36: requests, hand-off parameters and claims, at the router and straight at the workers."""
    misfit = {"prefill-1": {"seed": 1}}
    with Cluster.start(2, 1, pool_blocks=64, per_role=misfit) as cluster:
        before = cluster.processes
        with cluster.client() as client:
            info = client.model_info()
        prefill, decode = cluster.worker("prefill", 0), cluster.worker("decode", 0)
        tiers = Tiers(prefill, decode, claim_tokens(cluster.address, decode))
        # A model without a tokenizer: what is said of text and chats has a check of its own.
        cases = [
            case
            for case in router_cases(info.model, info.limits)
            if "text" not in case.name and "chat" not in case.name
        ]
        traffic = Traffic(cluster.address, streams=2)
        with traffic.flowing():
            wrong = [
                *against(cluster.address, cases),
                *against(cluster.address, cases),
                *against(prefill.address, list(prefill_cases(tiers))),
                *against(decode.address, list(decode_cases(tiers))),
                *against(decode.address, list(misfit_claims(tiers, [cluster.worker("prefill", 1)]))),
            ]
            prefill_for_nothing(tiers)
        outcomes = traffic.take()
        assert wrong == []
        assert len(outcomes) >= 3
        assert all(outcome.right for outcome in outcomes)
        assert {str(outcome.finish and outcome.finish.prefill_worker) for outcome in outcomes} == {str(prefill.key)}
        assert cluster.processes == before
        cluster.wait_idle()


def against(address: str, cases: list[Case]) -> list[str]:
    """What was answered other than it must be."""
    assert cases
    options = [*wire.CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        outcomes = [(case, case.outcome(channel)) for case in cases]
    return [
        f"{case.name}: {outcome}" for case, outcome in outcomes if not all(part in outcome for part in case.expected())
    ]
