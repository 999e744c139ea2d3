"""Sampling parameters: what is refused, by field, value and limit, and that the wire changes nothing."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from paceline import wire
from paceline.errors import InvalidRequest
from paceline.protos import common_pb2
from paceline.types import MAX_BIASES, SamplingParams

VOCAB = 100


@pytest.mark.parametrize("token_id", [VOCAB, 10**9, -1])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_an_id_outside_the_vocabulary_is_refused_by_its_field(field: str, token_id: int) -> None:
    """F19: such ids reach no engine."""
    if field == "logit_bias":
        sampling = SamplingParams(logit_bias=((5, 1.0), (token_id, 1.0)))
    else:
        sampling = SamplingParams(stop_token_ids=(5, token_id), min_tokens=1)
    with pytest.raises(InvalidRequest, match=f"{token_id}.*100") as caught:
        sampling.validated(vocab_size=VOCAB)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.01),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("min_tokens", 9),
        ("min_tokens", -1),
    ],
)
def test_a_value_past_its_limit_is_refused_by_its_field(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        msgspec.structs.replace(SamplingParams(max_tokens=8), **{field: value}).validated(vocab_size=VOCAB)
    assert caught.value.metadata["field"] == field
    assert str(value) in caught.value.message


@pytest.mark.parametrize("bias", [100.5, -101.0, math.nan, math.inf])
def test_a_bias_past_its_limit_is_refused(bias: float) -> None:
    with pytest.raises(InvalidRequest, match="for id 3"):
        SamplingParams(logit_bias=((3, bias),)).validated(vocab_size=VOCAB)


def test_too_many_biases_and_biases_that_leave_no_token_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="limit of"):
        SamplingParams(logit_bias=tuple((i, 1.0) for i in range(MAX_BIASES + 1))).validated(vocab_size=10**6)
    banned = tuple((token_id, -100.0) for token_id in range(VOCAB - 1))
    SamplingParams(logit_bias=banned).validated(vocab_size=VOCAB)
    with pytest.raises(InvalidRequest, match="all of the 100 tokens"):
        SamplingParams(logit_bias=banned, stop_token_ids=(VOCAB - 1,), min_tokens=1).validated(vocab_size=VOCAB)


def test_the_wire_carries_every_field_there_and_back() -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        min_tokens=2,
        n=3,
        best_of=4,
        logprobs=0,
        prompt_logprobs=2,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((1, -100.0), (9, 2.5)),
        beam_width=5,
        length_penalty=-0.5,
        early_stopping=True,
    )
    assert all(getattr(sampling, name) != getattr(SamplingParams(), name) for name in sampling.__struct_fields__)
    assert wire.sampling_from_proto(wire.sampling_to_proto(sampling), seed=0) == sampling


def test_what_is_not_set_takes_the_default_and_the_drawn_seed() -> None:
    assert wire.sampling_from_proto(common_pb2.SamplingParams(), seed=17) == SamplingParams(seed=17)
    assert wire.sampling_from_proto(common_pb2.SamplingParams(seed=0), seed=17).seed == 0


def beams(**more: Any) -> SamplingParams:
    return SamplingParams(**{"beam_width": 4, "temperature": 0.0, **more})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.5),
        ("top_k", 1),
        ("min_p", 0.1),
        ("best_of", 4),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", ((3, 1.0),)),
    ],
)
def test_a_beam_search_refuses_what_it_would_ignore(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field}: .*cannot be had with beam_width"):
        beams(**{field: value}).validated(vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width: 0 is not from n 1 to 32"),
        ({"beam_width": 33}, "beam_width: 33 is not from n 1 to 32"),
        ({"n": 5}, "beam_width: 4 is not from n 5 to 32"),
        ({"length_penalty": math.nan}, "length_penalty: nan is not a number from -10 to 10"),
        ({"length_penalty": 11.0}, "length_penalty: 11.0 is not a number from -10 to 10"),
        (
            {"stop_token_ids": tuple(range(97))},
            "beam_width: 4 beams and 97 stop_token_ids are more than the 100 tokens",
        ),
        ({"beam_width": None, "length_penalty": 2.0}, "length_penalty: 2.0 is for beam search alone"),
        ({"beam_width": None, "early_stopping": True}, "early_stopping: True is for beam search alone"),
    ],
)
def test_what_no_beam_search_can_be_is_refused_with_its_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        beams(**fields).validated(vocab_size=VOCAB)
    beams(n=4, stop_token_ids=tuple(range(96)), length_penalty=-10.0).validated(vocab_size=VOCAB)


def test_a_beam_search_needs_no_word_of_temperature() -> None:
    asked = common_pb2.SamplingParams(beam_width=4)
    assert wire.sampling_from_proto(asked, seed=0).validated(vocab_size=VOCAB) == beams()
    asked.temperature = 1.0
    with pytest.raises(InvalidRequest, match=r"temperature: 1\.0 cannot be had"):
        wire.sampling_from_proto(asked, seed=0).validated(vocab_size=VOCAB)
