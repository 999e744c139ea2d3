"""Bad input of every kind: each gets a clear error that names the value and the limit, and the services are unharmed.

Beside all of it a good client asks on and on; not one of its answers may fail or change by a token. The two prefill
workers that do not fit, by weights and by number format, are up all the while.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

import bad_starts
from paceline import wire
from paceline.client import Loads, Worker
from paceline.protos import router_pb2
from paceline.testing.broken_models import write_model
from paceline.testing.cluster import Cluster
from paceline.testing.hostile import Case, ask, generate, router_cases
from paceline.testing.hostile_workers import (
    Tiers,
    claim_tokens,
    decode_cases,
    misfit_claims,
    prefill_cases,
    prefill_for_nothing,
)
from paceline.testing.scrape import wait_for
from paceline.testing.traffic import Traffic
from processes import load_average
from report import Report

MODEL = "tiny-llama"
POOL_BLOCKS = 64  # 1,024 tokens, under the context's 2,048
GOOD_ANSWERS = 20
MISFIT = "weights_digest differs"


def run(report: Report) -> None:
    """Requests, calls to workers, and starts."""
    report.note("load average of the machine", load_average())
    with tempfile.TemporaryDirectory(prefix="paceline-bad-") as name:
        folder = Path(name)
        served, other = write_model(folder / "a" / MODEL), write_model(folder / "b" / MODEL, seed=1)
        misfits = {"prefill-1": {"model": str(other)}, "prefill-2": {"dtype": "bfloat16"}}
        with Cluster.start(3, 1, model=str(served), pool_blocks=POOL_BLOCKS, per_role=misfits) as cluster:
            before = cluster.processes
            traffic = Traffic(cluster.address, streams=1)
            with traffic.flowing():
                attack(report, cluster)
                bad_starts.run(report, cluster, folder)
            check_unharmed(report, cluster, traffic)
            report.equal("the same processes live on", cluster.processes, before)
            cluster.wait_idle()
        check_alone(report, served, other)


def attack(report: Report, cluster: Cluster) -> None:
    """Everything that can be sent."""
    with cluster.client() as client:
        info, loads = client.model_info(), client.loads()
    decode = by_id(loads, "decode-0")
    tiers = Tiers(by_id(loads, "prefill-0"), decode, claim_tokens(cluster.address, decode))
    misfits = [by_id(loads, "prefill-1"), by_id(loads, "prefill-2")]
    against(report, "router", cluster.address, router_cases(info.model, info.limits))
    check_double_id(report, cluster.address)
    against(report, "prefill", tiers.prefill.address, prefill_cases(tiers))
    report.note("prefill: a reservation that nobody made is refused", prefill_for_nothing(tiers))
    against(report, "decode", tiers.decode.address, decode_cases(tiers))
    against(report, "decode", tiers.decode.address, misfit_claims(tiers, misfits))


def against(report: Report, of: str, address: str, cases: Iterable[Case]) -> None:
    """One service's cases, a row each."""
    with grpc.insecure_channel(address, options=SEND_ALL) as channel:
        for case in cases:
            report.contains(f"{of}: {case.name}", case.outcome(channel), *case.expected())


SEND_ALL = (*wire.CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1))
"""Channels that let a message go that is too long for the other side."""


def check_double_id(report: Report, address: str) -> None:
    """The id of a request that has not ended."""
    request = ask(max_tokens=900, ignore_eos=True)
    request.request_id = "twice"
    with grpc.insecure_channel(address, options=SEND_ALL) as channel:
        method: Any = channel.unary_stream("/paceline.v1.Router/Generate")
        first = method(request.SerializeToString())
        next(first)
        case = Case(
            "a request_id in use", generate(request), "INVALID_ARGUMENT", "INVALID_REQUEST", ("'twice'", "in use")
        )
        report.contains(f"router: {case.name}", case.outcome(channel), *case.expected())
        pieces = [router_pb2.GenerateResponse.FromString(piece) for piece in first]
        report.equal("router: the first of that id ends well", pieces[-1].finish.usage.completion_tokens, 900)


def check_unharmed(report: Report, cluster: Cluster, traffic: Traffic) -> None:
    """The good client's answers, and who gave them."""
    outcomes = traffic.take()
    report.at_least("good answers meanwhile", sum(outcome.error is None for outcome in outcomes), GOOD_ANSWERS)
    report.equal("good requests that failed", [str(outcome.error) for outcome in outcomes if outcome.error], [])
    finishes = [outcome.finish for outcome in outcomes if outcome.finish is not None]
    report.equal("good answers with a wrong token", sum(not outcome.right for outcome in outcomes), 0)
    report.note("slowest good answer", max(outcome.seconds for outcome in outcomes), "s")
    by = {str(finish.prefill_worker).partition("@")[0] for finish in finishes}
    report.equal("prefill workers that served: the one that fits", sorted(by), ["prefill-0"])


def check_alone(report: Report, served: Path, other: Path) -> None:
    """Only prefill workers that do not fit: the decode worker computes prompts itself, and says why."""
    with Cluster.start(
        1, 1, model=str(served), pool_blocks=POOL_BLOCKS, per_role={"prefill-0": {"model": str(other)}}
    ) as cluster:
        with cluster.client() as client:
            finish = client.complete([3] * 200, max_tokens=4, temperature=0.0, ignore_eos=True).finish
        report.equal("misfit alone: prefill worker of a request", finish.prefill_worker, None)
        report.equal("misfit alone: prompt tokens computed on D", finish.prompt_tokens_computed_on_decode, 200)
        # The decode worker refused its claim at the start of the pair, and it said so in its own time.
        wait_for(lambda: any(MISFIT in line for line in cluster.log("prefill-0")), "the refusal in the log")
        [told, *_] = [line for line in cluster.log("prefill-0") if MISFIT in line]
        report.contains("misfit alone: its log names both digests", told[told.index(MISFIT) :], "here", "at the peer")


def by_id(loads: Loads, name: str) -> Worker:
    """A registered worker."""
    return next(worker for worker in loads.workers if worker.key.worker_id == name)
