from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.loadtest.config import BenchConfig, Mode, Slo, load_bench


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "exactly one of rate, concurrency and trace must be given, and none is"),
        ({"rate": 1.0, "concurrency": 2}, "and rate and concurrency are"),
        ({"find_goodput": True}, "it needs slo_ttft_ms, slo_itl_ms or both"),
        ({"find_goodput": True, "slo_itl_ms": 5.0, "concurrency": 2}, "concurrency leaves no room for"),
        ({"rate": 1.0, "openai": "localhost:8000", "vocab_size": 9}, "'localhost:8000' is not a URL"),
        ({"rate": 1.0, "openai": "http://localhost:8000/v1"}, "give vocab_size or tokenizer"),
        (
            {"rate": 1.0, "openai": "http://me:secret@localhost/v1", "vocab_size": 9},
            "a user or a password is not taken",
        ),
        ({"rate": 1.0, "tokenizer": "smollm2-135m-instruct"}, "it is for --openai"),
        ({"rate": 1.0, "router": "nowhere"}, "'nowhere' is not host:port"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BenchConfig(**settings)
    assert named in raised.value.message
    assert "secret" not in raised.value.message


def test_the_mode_is_told_by_what_is_given() -> None:
    assert BenchConfig(rate=1.0).mode is Mode.OPEN
    assert BenchConfig(concurrency=1).mode is Mode.CLOSED
    assert BenchConfig(trace=Path("x")).mode is Mode.TRACE


def test_limits_in_milliseconds_become_seconds() -> None:
    assert BenchConfig(rate=1.0).slo is None
    assert BenchConfig(rate=1.0, slo_ttft_ms=250).slo == Slo(ttft_s=0.25, itl_s=None)


def test_a_flag_beats_the_file_and_the_environment_names_the_router_alone(tmp_path: Path) -> None:
    file = tmp_path / "load.toml"
    file.write_text("rate = 3\n[bench]\ninput_len = 7\nseed = 5\n")
    env = {"PACELINE_ROUTER": "a:1,b:2", "PACELINE_SEED": "9", "PACELINE_RATE": "9"}
    config = load_bench(file=file, env=env, flags={"input_len": "8"})
    assert (config.rate, config.input_len, config.seed, config.router) == (3.0, 8, 5, "a:1")


def test_a_key_that_is_no_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "load.toml"
    file.write_text("input_length = 7\n")
    with pytest.raises(ConfigError, match="input_length"):
        load_bench(file=file, env={}, flags={"rate": "1"})
