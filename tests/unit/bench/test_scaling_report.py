from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def scaling_report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import scaling_report

    yield scaling_report
    del sys.modules["scaling_report"]


def cell(scaling_report: Any, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "shape": "1P1D",
        "workers": 2,
        "devices": 2,
        "per_device": 1,
        "device": "cuda",
        "model": "m",
        "input_tokens": 1024,
        "output_tokens": 128,
        "commit": "abc",
        "concurrency": 64,
        "tokens_per_s": 3000.0,
        "requests_per_s": 23.4,
        "failed": 0,
        "goodput": {"500": 20.0, "100": None},
        "slo_itl_ms": 15.0,
        "warnings": [],
    }
    return scaling_report.Cell(**(values | fields))


def test_a_measurement_replaces_an_earlier_one_of_its_kind_alone(scaling_report: Any, tmp_path: Path) -> None:
    file = tmp_path / "out" / "scaling.json"
    first, other, again = (
        cell(scaling_report, **fields) for fields in ({}, {"per_device": 2}, {"tokens_per_s": 4000.0})
    )
    cells = scaling_report.load_cells(file)
    for new in (first, other, again):
        cells = scaling_report.keep(file, cells, new)
    assert cells == [other, again]
    assert scaling_report.load_cells(file) == cells


def test_the_table_has_rates_for_each_device_and_says_where_no_rate_went_well(scaling_report: Any) -> None:
    text = scaling_report.markdown([cell(scaling_report), cell(scaling_report, shape="2C", per_device=2, devices=1)])
    lines = text.splitlines()
    assert lines[0] == "1,024 tokens in, 128 out; goodput: requests/s with ITL p99 <= 15 ms"
    assert "| 1P1D | 2 | 3,000 | 1,500 | 23.4 | 20 | none |" in lines
    assert "| 2C, 2 a device | 1 | 3,000 | 3,000 | 23.4 | 20 | none |" in lines


def test_a_plot_is_drawn(scaling_report: Any, tmp_path: Path) -> None:
    scaling_report.plot([cell(scaling_report), cell(scaling_report, input_tokens=8192)], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
