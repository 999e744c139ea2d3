from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
GPUS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import shapes

    yield shapes
    del sys.modules["shapes"]


@pytest.mark.parametrize(("text", "prefill", "decode"), [("2P1D", 2, 1), ("1p3d", 1, 3), (" 4C", 0, 4)])
def test_a_shape_is_read_and_written(shapes: Any, text: str, prefill: int, decode: int) -> None:
    shape = shapes.Shape.parse(text)
    assert (shape.prefill, shape.decode, shape.workers) == (prefill, decode, prefill + decode)
    assert str(shape) == text.strip().upper()


@pytest.mark.parametrize("text", ["", "P1D", "0P1D", "2P", "0C", "1P1D1C"])
def test_what_is_no_shape_is_refused(shapes: Any, text: str) -> None:
    with pytest.raises(ValueError, match="is no shape such as 2P1D"):
        shapes.Shape.parse(text)


@pytest.mark.parametrize(
    ("text", "per_device", "prefill", "decode"),
    [
        ("1P1D", 1, ("cuda:0",), ("cuda:1",)),
        ("3P1D", 1, ("cuda:0", "cuda:2", "cuda:3"), ("cuda:1",)),
        ("3C", 1, (), ("cuda:0", "cuda:1", "cuda:2")),
        ("1P1D", 2, ("cuda:0",), ("cuda:0",)),
        ("2P2D", 2, ("cuda:0", "cuda:1"), ("cuda:0", "cuda:1")),
        ("1P3D", 2, ("cuda:0",), ("cuda:0", "cuda:1", "cuda:1")),
    ],
)
def test_workers_fill_one_device_after_another_and_the_tiers_take_turns(
    shapes: Any, text: str, per_device: int, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    assert shapes.seat(shapes.Shape.parse(text), GPUS, per_device) == shapes.Seats(prefill, decode)


def test_a_shape_that_does_not_fit_has_no_seats_and_a_cpu_takes_any(shapes: Any) -> None:
    assert shapes.seat(shapes.Shape(3, 2), GPUS, 1) is None
    assert shapes.seat(shapes.Shape(3, 2), ["cpu"], 1).devices == 1


def test_up_is_told_the_devices(shapes: Any) -> None:
    seats = shapes.seat(shapes.Shape(1, 2), GPUS, 1)
    assert seats.flags() == ["--decode-devices=cuda:1,cuda:2", "--prefill-devices=cuda:0"]
    assert seats.devices == 3
    assert shapes.seat(shapes.Shape(0, 1), GPUS, 1).flags() == ["--decode-devices=cuda:0"]
