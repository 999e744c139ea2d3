"""What a scaling benchmark makes of its measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Balance
from paceline.loadtest.summary import Throughput

Bench = Callable[[str], Any]

# A prefill worker takes 40 requests a second, a decode worker 100.
BALANCE = Balance(
    prompt_tokens=1_000,
    generated_tokens=100,
    prefill_tokens_per_s=40_000,
    decode_tokens_per_s=10_000,
    batch_requests=256,
    step_s=4e-3,
    step_per_request_s=50e-6,
    prefill_per_decode=2.5,
)


def tier(bench: Bench, workers: int, **fields: Any) -> Any:
    values = {"tokens_per_s": 100.0 * workers, "busy_share": 0.5, "running": 3.0, "used_share": 0.1}
    return bench("scaling_cells").Tier(workers=workers, **(values | fields))


def cell(bench: Bench, shape: str = "1P1D", **fields: Any) -> Any:
    parsed = bench("shapes").Shape.parse(shape)
    values: dict[str, Any] = {
        "shape": shape,
        "devices": parsed.workers,
        "per_device": 1,
        "device": "cuda",
        "model": "m",
        "input_tokens": 1024,
        "output_tokens": 128,
        "commit": "abc",
        "concurrency": 64,
        "tokens_per_s": 3000.0,
        "requests_per_s": 23.4,
        "itl_p99_ms": 7.5,
        "prefill": tier(bench, parsed.prefill, busy_share=0.99) if parsed.prefill else None,
        "decode": tier(bench, parsed.decode),
        "batch_requests": 256,
        "kv_gb_per_s": 3.2,
        "balance": None,
        "failed": 0,
        "goodput": {"500": found(bench, 20.0, 22.0), "100": found(bench, None, 5.0)},
        "slo_itl_ms": 15.0,
        "warnings": [],
    }
    return bench("scaling_cells").Cell(**(values | fields))


def found(bench: Bench, passed: float | None, failed: float | None) -> Any:
    return bench("scaling_cells").Found(passed=passed, failed=failed)


def test_a_measurement_replaces_an_earlier_one_of_its_kind_alone(bench: Bench, tmp_path: Path) -> None:
    cells = bench("scaling_cells")
    file = tmp_path / "out" / "scaling.json"
    kept = cells.load_cells(file)
    first, other, again = (
        cell(bench, **fields) for fields in ({"balance": BALANCE}, {"per_device": 2}, {"tokens_per_s": 4e3})
    )
    for new in (first, other, again):
        kept = cells.keep(file, kept, new)
    assert kept == [other, again]
    assert cells.load_cells(file) == kept


@pytest.mark.parametrize(
    ("prefill", "decode", "saturated"),
    [
        ({"busy_share": 0.95}, {}, "prefill"),
        ({}, {"running": 60.0}, "decode"),  # nearly all of the loop's 64 requests
        ({}, {"used_share": 0.9}, "decode"),
        ({"busy_share": 0.95}, {"used_share": 0.9}, "prefill and decode"),
        ({}, {"running": 40.0}, "neither"),
    ],
)
def test_the_tier_that_holds_the_other_up_is_named(
    bench: Bench, prefill: dict[str, float], decode: dict[str, float], saturated: str
) -> None:
    assert cell(bench, prefill=tier(bench, 1, **prefill), decode=tier(bench, 1, **decode)).saturated == saturated


def test_a_worker_more_is_measured_by_what_those_before_it_did(bench: Bench) -> None:
    one, two, three = (
        cell(bench, f"{n}P1D", prefill=tier(bench, n, busy_share=0.99, tokens_per_s=rate))
        for n, rate in ((1, 100.0), (2, 198.0), (3, 240.0))
    )
    found = [gain for gain in bench("scaling_laws").gains([one, two, three]) if gain.tier == "prefill"]
    assert [(gain.before.shape, gain.after.shape, gain.unfit) for gain in found] == [
        ("1P1D", "2P1D", None),
        ("2P1D", "3P1D", None),
    ]
    assert [gain.share for gain in found] == pytest.approx([0.98, 42 / 99])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"per_device": 2}, "workers share a device"),
        ({"device": "cpu"}, "workers share a device"),
        ({"per_device": 4, "parts": 4}, "workers share a device's memory and power"),
        ({"per_device": 4, "parts": 4, "concurrency": 3}, "the other tier is saturated in 1P1D"),
        ({"concurrency": 3}, "the other tier is saturated in 1P1D"),
        ({"prefill": None}, "it is not saturated in 1P1D"),
    ],
)
def test_a_worker_more_says_nothing_where_its_tier_is_not_what_holds_up(
    bench: Bench, fields: dict[str, Any], why: str
) -> None:
    cells = [cell(bench, shape, **{k: v for k, v in fields.items() if v}) for shape in ("1P1D", "2P1D")]
    if "prefill" in fields:
        cells = [cell(bench, f"{n}P1D", prefill=tier(bench, n, busy_share=0.5)) for n in (1, 2)]
    [gain] = bench("scaling_laws").gains(cells)
    assert gain.unfit == why


@pytest.mark.parametrize(("workers", "shape"), [(2, "1P1D"), (3, "2P1D"), (4, "3P1D"), (7, "5P2D")])
def test_an_estimate_divides_workers_so_that_the_slower_tier_is_as_fast_as_can_be(
    bench: Bench, workers: int, shape: str
) -> None:
    assert str(bench("scaling_laws").best_split(BALANCE, workers)) == shape


def test_the_best_shape_is_held_against_what_the_smallest_ones_router_said(bench: Bench) -> None:
    other = Balance(**{name: getattr(BALANCE, name) for name in BALANCE.__struct_fields__} | {"prompt_tokens": 10.0})
    cells = [
        cell(bench, "1P1D", balance=BALANCE),
        cell(bench, "2P1D", requests_per_s=60.0, balance=other),
        cell(bench, "1P2D", requests_per_s=30.0),
        cell(bench, "3C", requests_per_s=99.0),
    ]
    [ratio] = bench("scaling_laws").ratios(cells)
    assert (ratio.best, ratio.expected, ratio.told_by, ratio.foretold) == ("2P1D", "2P1D", "1P1D", True)
    assert ratio.measured == {"2P1D": 60.0, "1P2D": 30.0}
    [blind] = bench("scaling_laws").ratios([cells[2], cell(bench, "2P1D", requests_per_s=60.0)])
    assert (blind.best, blind.expected, blind.foretold) == ("2P1D", None, None)


def test_the_tables_have_tiers_and_goodput_and_say_what_was_not_found(bench: Bench) -> None:
    text = bench("scaling_report").markdown([cell(bench), cell(bench, "2C", per_device=2, devices=1, goodput={})])
    assert "1P1D, 1/4 of a device" in bench("scaling_report").markdown([cell(bench, per_device=4, parts=4)])
    lines = text.splitlines()
    assert lines[0] == "1,024 tokens in, 128 out, at saturation"
    assert "| 1P1D | 2 | 23.4 | 3,000 | 1,500 | 7.5 | 100 | 99% | 100 | 3 | 10% | 3.2 | prefill |" in lines
    assert "| 2C, 2 a device | 1 | 23.4 | 3,000 | 3,000 | 7.5 |  |  | 200 | 3 | 10% | 3.2 | neither |" in lines
    assert "| 1P1D | 20 (not 22) | under 5 |" in lines
    assert "Goodput, requests/s, with ITL p99 <= 15 ms" in lines


def test_a_plot_is_drawn(bench: Bench, tmp_path: Path) -> None:
    cells = [cell(bench), cell(bench, "2P1D"), cell(bench, "2C", input_tokens=8192, goodput={})]
    bench("scaling_report").plot(cells, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_loads_are_read_and_written_with_their_places(bench: Bench) -> None:
    load = bench("scaling_measure").Load
    for text in ("1024x128", "128x512@32"):
        assert str(load.parse(text)) == text
    assert load.parse("1024x128").concurrency(3, 1, 64) == 192
    assert load.parse("8192x64").concurrency(2, 1, 64) == 16
    assert load.parse("8192x64").concurrency(2, 1, 4) == 8
    assert load.parse("128x512@32").concurrency(4, 3, 64) == 96
    for text in ("", "1024", "1024x", "axb", "1x2x3", "1x2@x"):
        with pytest.raises(ValueError):
            load.parse(text)


def test_a_rate_counts_what_came_within_the_window(bench: Bench) -> None:
    window = Throughput(from_s=1.0, to_s=3.0, output_tokens=0, requests=0)
    events = [(0.9, 100), (1.5, 3), (2.5, 5), (1.5, 4), (3.1, 100)]
    assert bench("scaling_measure").rate_of(events, window) == 5


def test_a_rate_does_not_hang_on_where_between_two_prompts_the_window_ends(bench: Bench) -> None:
    prompts = [(0.5 * number, 8192) for number in range(100)]
    for begin in (1.0, 1.1, 1.3):
        window = Throughput(from_s=begin, to_s=begin + 2.7, output_tokens=0, requests=0)
        assert bench("scaling_measure").rate_of(prompts, window) == pytest.approx(2 * 8192)


@pytest.mark.parametrize("events", [[], [(2.0, 4)], [(2.0, 3), (2.0, 1)]])
def test_a_rate_of_what_came_at_one_moment_is_over_the_window(bench: Bench, events: list[tuple[float, int]]) -> None:
    window = Throughput(from_s=1.0, to_s=3.0, output_tokens=0, requests=0)
    assert bench("scaling_measure").rate_of(events, window) == sum(amount for _, amount in events) / 2


def means(bench: Bench, **fields: Any) -> Any:
    values = {"seconds": 10.0, "least_requests": 100, "probes": 6, "tolerance": 0.1, "processes": 1, "places": 64}
    return bench("scaling_measure").Means(**(values | {"ttft_ms": (500.0, 100.0), "itl_ms": 15.0} | fields))


@pytest.mark.parametrize("probes", [1, 2, 6, 40])
def test_a_search_tries_no_more_rates_than_it_may_and_judges_each_by_every_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, probes: int
) -> None:
    measure = bench("scaling_measure")
    limits = {500.0: 33.0, 100.0: 21.0}
    tried: list[float] = []

    def probe(_means: Any, _router: str, _load: Any, rate: float, ttft_ms: float, *, seed: int) -> Any:
        tried.append(rate)
        return type("Probe", (), {"rate": rate, "outcomes": []})

    monkeypatch.setattr(measure, "_probe", probe)
    monkeypatch.setattr(measure, "_goes_well", lambda probe, ttft_ms, _itl_ms: probe.rate <= limits[ttft_ms])
    load = measure.Load(1024, 128)
    found, failed = measure.search_goodput(means(bench, probes=probes), "router", load, 40.0, lambda _: None)
    assert len(tried) == len(set(tried)) <= probes
    assert failed == 0
    for ttft_ms, limit in limits.items():
        bounds = found[f"{ttft_ms:g}"]
        assert bounds.passed is None or bounds.passed <= limit
        assert bounds.failed is None or bounds.failed > limit
    if probes == 40:
        assert found["500"].failed / found["500"].passed <= 1.1
        assert found["100"].failed / found["100"].passed <= 1.1


def test_what_would_not_end_in_time_is_left_out(bench: Bench) -> None:
    times = bench("scaling_times").Times(means(bench, probes=0), on_gpu=True)
    shape, loads = bench("shapes").Shape(1, 1), [bench("scaling_measure").Load(n, 8) for n in (1, 2, 3)]
    whole = times.shape(shape, loads)
    assert times.fitting(shape, loads, float("inf")) == loads
    assert times.fitting(shape, loads, whole) == loads
    assert times.fitting(shape, loads, whole - 1) == loads[:2]
    assert times.fitting(shape, loads, 5) == []
    assert bench("scaling_times").Times(means(bench), on_gpu=True).shape(shape, loads) > whole


@pytest.mark.parametrize(
    ("devices", "case", "expected"),
    [
        ("0123", (2, 1), ("01", "3")),
        ("0123", (1, 3), ("0", "123")),
        ("0123", (3, 1), ("012", "3")),
        ("0123", (2, 2), ("01", "23")),
        ("01", (2, 1), ("00", "1")),
        ("01", (1, 3), ("0", "111")),
        ("0", (2, 3), ("00", "000")),
    ],
)
def test_writers_and_targets_have_devices_of_their_own_where_there_are_two(
    bench: Bench, devices: str, case: tuple[int, int], expected: tuple[str, str]
) -> None:
    assert bench("transfer_fan").seats(devices, *case) == tuple(map(list, expected))
