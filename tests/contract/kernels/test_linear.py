"""The dense product with few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from paceline import kernels
from paceline.kernels import gemv, native
from paceline.kernels.linear_shapes import GemvShape
from paceline.kernels.native.quantised import quantised_of
from paceline.testing.nearness import DTYPES, assert_near, cases

SHAPES = {
    "dtype": DTYPES,
    "rows": (0, 1, 2, 9, 16, 17, 40, 100, 128, 129, 144, 145),
    "outputs": (1, 63, 64, 200),
    "inputs": (8, 64, 130, 1100, 2048),
    "bias": (False, True),
}


@cases(SHAPES)
def test_linear_is_that_of_float64(case: dict[str, Any], backend: kernels.Backend, device: torch.device) -> None:
    dtype, rows, outputs, inputs, biased = case.values()
    source = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=source).to(dtype).to(device)
    weight = (torch.randn(outputs, inputs, generator=source) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(outputs, generator=source).to(dtype).to(device) if biased else None
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    found = kernels.linear(x, weight, bias)
    assert found.shape == wanted.shape
    if rows:
        assert_near(found, wanted)
    if backend is kernels.Backend.TRITON and 0 < rows <= 144:
        from paceline.kernels.linear_shapes import stream_shape
        from paceline.kernels.skinny_linear import stream_weights

        shape = stream_shape(rows, outputs, inputs, x.element_size())
        for _ in range(2):  # The second use finds what the first left of the counters that pieces share.
            assert_near(stream_weights(x, weight, bias, shape), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are a GPU's")
def test_pieces_are_counted_in_graphs_by_what_was_there_before_their_capture(
    triton_backend: None, device: torch.device
) -> None:
    from paceline.kernels.linear_shapes import stream_shape
    from paceline.kernels.skinny_linear import stream_weights

    x, weight = torch.randn(16, 1100, device=device), torch.randn(200, 1100, device=device)
    shape = stream_shape(16, 200, 1100, x.element_size())
    assert shape.splits > 1
    stream = torch.cuda.Stream()
    unprepared = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before it is captured"), torch.cuda.graph(unprepared, stream=stream):
        stream_weights(x, weight, None, shape)
    with torch.cuda.stream(stream):
        stream_weights(x, weight, None, shape)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = stream_weights(x, weight, None, shape)
        graphs.append((graph, found))
    for graph, found in reversed(graphs):  # no graph's replay hangs on an earlier one's
        found.zero_()
        graph.replay()
        assert_near(found, x.double() @ weight.double().T)


@cases(
    {
        "dtype": DTYPES,
        "rows": (1, 2, 3, 4),
        "outputs": (1, 7, 64, 200),
        "inputs": (8, 64, 130, 1100, 2048),
        "bias": (False, True),
        "shape": (GemvShape(1, 1024, 4), GemvShape(4, 256, 8), GemvShape(2, 4096, 4)),
    }
)
def test_a_product_of_few_rows_is_that_of_float64(
    case: dict[str, Any], triton_backend: None, device: torch.device
) -> None:
    dtype, rows, outputs, inputs, biased, shape = case.values()
    source = torch.Generator().manual_seed(rows)
    x = torch.randn(rows + 1, inputs, generator=source).to(dtype).to(device)[:rows]
    weight = (torch.randn(outputs, inputs, generator=source) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(outputs, generator=source).to(dtype).to(device) if biased else None
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert_near(gemv.multiply(x, weight, bias, shape), wanted)


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
def test_pieces_add_up(splits: int, triton_backend: None, device: torch.device) -> None:
    """Also when some have less to do than others, or nothing."""
    from paceline.kernels.linear_shapes import StreamShape
    from paceline.kernels.skinny_linear import stream_weights

    source = torch.Generator().manual_seed(splits)
    x, weight = torch.randn(130, 300, generator=source).to(device), torch.randn(70, 300, generator=source).to(device)
    found = stream_weights(x, weight, None, StreamShape(128, 16, 64, 32, splits, 4, 1))
    assert_near(found, x.double() @ weight.double().T)


def test_a_row_is_the_same_beside_others_of_the_same_tile(triton_backend: None, device: torch.device) -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(16, 1100, generator=source).to(torch.bfloat16).to(device)
    weight = torch.randn(64, 1100, generator=source).to(torch.bfloat16).to(device)
    assert torch.equal(kernels.linear(x[3:5], weight), kernels.linear(x, weight)[3:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_in_c_is_the_same_alone_and_among_others(
    dtype: torch.dtype, in_c: native.Loaded | native.Missing, device: torch.device
) -> None:
    if device.type != "cpu" or isinstance(in_c, native.Missing):
        pytest.skip("kernels in C compute on a CPU with a compiler")
    source = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 576, generator=source).to(dtype) for rows in (23, 200))
    with kernels.forced(kernels.Backend.NATIVE):
        together = kernels.linear(x, weight)
        for rows in (1, 2, 3, 4, 7, 8, 16):
            assert torch.equal(kernels.linear(x[:rows].clone(), weight), together[:rows])


def test_the_table_names_shapes_that_the_kernels_take() -> None:
    from paceline.kernels import linear_shapes

    measured = linear_shapes._measured()
    assert (28672, 4096) in measured
    for entries in measured.values():
        bounds = [rows for rows, _ in entries]
        assert bounds == sorted(set(bounds))
        for rows, shape in entries:
            if isinstance(shape, GemvShape):
                assert rows <= gemv.MOST_ROWS
            elif shape is not None:
                assert rows <= shape.rows + shape.tail


@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_quantised_rows_are_widened_to_what_they_dequantise_to(
    encoding: str, in_c: native.Loaded | native.Missing, device: torch.device
) -> None:
    if device.type != "cpu" or isinstance(in_c, native.Missing):
        pytest.skip("kernels in C compute on a CPU with a compiler")
    kind = GGMLQuantizationType[encoding]
    drawn = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    rows = quants.quantize(drawn.numpy(), kind)
    weight = torch.from_numpy(quants.dequantize(rows, kind))
    assert kernels.nbytes_read(weight) == weight.nbytes
    kernels.attach_quantised(weight, encoding, torch.from_numpy(rows))
    assert quantised_of(weight) is not None
    assert kernels.nbytes_read(weight) == rows.nbytes
    with kernels.forced(kernels.Backend.NATIVE):
        for first in range(0, 96, 24):
            ones = torch.eye(96)[first : first + 24]
            assert torch.equal(kernels.linear(ones, weight), weight.T[first : first + 24])
        x, bias = torch.randn(7, 96), torch.randn(64)
        assert_near(kernels.linear(x, weight, bias), x.double() @ weight.double().T + bias.double())
