from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

SPEC = importlib.util.spec_from_file_location("bench_report", Path(__file__).parents[3] / "bench" / "report.py")
assert SPEC is not None and SPEC.loader is not None
module = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = module  # dataclasses look their module up there
SPEC.loader.exec_module(module)

PASSING: list[Callable[[Any], object]] = [
    lambda report: report.at_most("x", 2, 2),
    lambda report: report.at_least("x", 2, 2),
    lambda report: report.equal("x", [], []),
    lambda report: report.contains("x", "port 70000 is over 65535", "70000", "65535"),
]
FAILING: list[Callable[[Any], object]] = [
    lambda report: report.at_most("x", 2.1, 2),
    lambda report: report.at_most("x", float("nan"), 2),
    lambda report: report.at_least("x", 1.9, 2),
    lambda report: report.at_least("x", float("nan"), 2),
    lambda report: report.equal("x", ["a"], []),
    lambda report: report.contains("x", "bad port", "70000"),
    lambda report: report.fail("x", "it broke"),
    lambda report: report.note("x", 1),
    lambda report: None,
]


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def report(tmp_path: Path, text: io.StringIO) -> Any:
    return module.Report("trial", Console(file=text, width=100), tmp_path)


@pytest.mark.parametrize("judge", PASSING)
def test_a_value_within_its_limit_passes(report: Any, judge: Callable[[Any], object]) -> None:
    judge(report)
    assert report.finish() == 0


@pytest.mark.parametrize("judge", FAILING)
def test_a_value_past_its_limit_fails_and_so_does_a_report_that_judged_nothing(
    report: Any, judge: Callable[[Any], object]
) -> None:
    judge(report)
    assert report.finish() == 1


def test_one_failure_among_many_fails_the_report(report: Any) -> None:
    report.at_most("good", 1, 2)
    report.at_most("bad", 3, 2)
    report.at_most("good again", 1, 2)
    assert report.finish() == 1


def test_an_error_inside_a_check_is_a_failure_that_is_shown(report: Any, text: io.StringIO) -> None:
    with report:
        report.at_most("good", 1, 2)
        raise OSError("no such thing")
    assert report.finish() == 1
    assert "no such thing" in text.getvalue()


def test_the_table_has_measured_value_and_limit_and_the_json_has_the_same(
    report: Any, text: io.StringIO, tmp_path: Path
) -> None:
    report.at_most("ready", 12.345, 15, "s")
    report.finish()
    assert "12.3" in text.getvalue() and "<= 15 s" in text.getvalue() and "ok" in text.getvalue()
    document = json.loads((tmp_path / "trial.json").read_text())
    assert document["ok"] is True
    assert document["rows"][0]["limit"] == "<= 15 s"
