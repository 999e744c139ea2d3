"""What workers tell of themselves comes back from the wire as it was, whatever KV groups the model has."""

from __future__ import annotations

import re

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline import wire
from paceline.errors import InvalidRequest
from paceline.kvtransfer.layout import Fingerprint, KvLayout
from paceline.protos import common_pb2
from paceline.services.worker.convert import fingerprint_from_proto, fingerprint_to_proto
from paceline.types import Limits, Work, WorkerLoad


@pytest.mark.parametrize("windows", [(None,), (4096,), (None, None, 512, 512)])
def test_a_fingerprint_comes_back_with_its_groups(windows: tuple[int | None, ...]) -> None:
    layout = KvLayout(layers=3, kv_heads=1, head_dim=256, dtype="bfloat16", windows=windows)
    fingerprint = Fingerprint.of(layout, model="m", weights_digest="d")
    message = common_pb2.Fingerprint.FromString(fingerprint_to_proto(fingerprint).SerializeToString())
    assert fingerprint_from_proto(message) == fingerprint


def test_groups_whose_blocks_differ_are_refused() -> None:
    groups = [common_pb2.KvGroup(layers=layers, kv_heads=1, head_dim=8) for layers in (1, 2)]
    with pytest.raises(InvalidRequest, match="2 shapes of blocks"):
        fingerprint_from_proto(common_pb2.Fingerprint(groups=groups))
    with pytest.raises(InvalidRequest, match="0 shapes of blocks"):
        fingerprint_from_proto(common_pb2.Fingerprint())


@pytest.mark.parametrize(
    ("most_blocks", "windows"), [((None,), (None,)), ((65,), (512,)), ((None, 65, 65), (None, 512, 512))]
)
def test_limits_come_back_with_what_a_request_has_of_each_group_and_what_a_step_reads(
    most_blocks: tuple[int | None, ...], windows: tuple[int | None, ...]
) -> None:
    limits = Limits(
        vocab_size=5,
        context_tokens=6,
        pool_blocks=7,
        most_blocks=most_blocks,
        batch_requests=8,
        step_weight_bytes=2**40,
        block_bytes=2**33,
        windows=windows,
    )
    message = common_pb2.Limits.FromString(wire.limits_to_proto(limits).SerializeToString())
    assert wire.limits_from_proto(message) == limits


def test_limits_of_an_older_worker_do_not_tell_what_a_step_reads() -> None:
    limits = wire.limits_from_proto(common_pb2.Limits(vocab_size=5, context_tokens=6, pool_blocks=7))
    assert (limits.step_weight_bytes, limits.block_bytes, limits.windows) == (0, 0, (None,))


def test_a_load_comes_back_with_the_work_of_the_engine() -> None:
    work = Work(busy_s=1.25, steps=1, prompt_tokens=2**40, generated_tokens=3)
    load = WorkerLoad(running=4, total_blocks=5, work=work)
    assert wire.load_from_proto(common_pb2.Load.FromString(wire.load_to_proto(load).SerializeToString())) == load


@pytest.mark.parametrize("seconds", [-1, 10**10 + 1, 10**12, 2**63 - 1, -(2**63)])
def test_a_load_with_a_time_that_cannot_be_is_refused_by_name_value_and_limit(seconds: int) -> None:
    impossible = Duration(seconds=seconds)
    for field, load in {
        "load.tick_age": common_pb2.Load(tick_age=impossible),
        "load.work.busy": common_pb2.Load(work=common_pb2.Work(busy=impossible)),
    }.items():
        with pytest.raises(
            InvalidRequest, match=re.escape(f"{field}: {float(seconds):g} s is not from 0 to {10**10} s")
        ):
            wire.load_from_proto(load)


def test_any_time_that_is_taken_in_can_be_sent_on() -> None:
    load = common_pb2.Load(tick_age=Duration(seconds=10**10), work=common_pb2.Work(busy=Duration(seconds=10**10)))
    assert wire.load_to_proto(wire.load_from_proto(load)) == load
