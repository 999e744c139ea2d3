"""Every encoding of a tensor that the gguf library can turn back into numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from paceline.checkpoint import Source, SourceKind, open_tensors
from paceline.checkpoint.dummy import SHAPES
from paceline.errors import CheckpointError
from paceline.testing.checkpoints import random_tensors, save_gguf

WIDE = msgspec.structs.replace(SHAPES["tiny"], hidden_size=256, intermediate_size=256, num_heads=16, num_kv_heads=4)
NAME = "model.layers.0.mlp.down_proj.weight"


def can(kind: GGMLQuantizationType, work: str) -> bool:
    """Whether the library can `quantize` or `dequantize` this kind."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        if work == "quantize":
            gguf.quantize(np.zeros((1, block), np.float32), kind)
        else:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTIZED = [kind for kind in GGMLQuantizationType if can(kind, "quantize")]
DEQUANTIZED = [kind for kind in GGMLQuantizationType if can(kind, "dequantize")]
REFUSED = [kind for kind in GGMLQuantizationType if not can(kind, "dequantize")]
# Of a value in a matrix whose values are of the order of 0.1.
CLOSE = {"F32": 0.0, "F16": 3e-4, "BF16": 2e-3, "Q8_0": 3e-3, "Q5_0": 3e-2, "Q5_1": 3e-2, "Q4_0": 6e-2, "Q4_1": 6e-2}


def source_with(path: Path, blocks: NDArray[np.uint8], kind: GGMLQuantizationType) -> Source:
    """A model with one more tensor, `rows` [rows, bytes] of whole blocks."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    for key, value in (
        ("block_count", 1),
        ("context_length", 8),
        ("embedding_length", 64),
        ("feed_forward_length", 8),
        ("attention.head_count", 4),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Source(SourceKind.GGUF, "it", path)


def read(source: Source) -> NDArray[np.float32]:
    with open_tensors(source) as tensors:
        values = tensors.read(NAME).array
        assert values.dtype == np.float32
        return np.array(values)


def test_the_library_knows_the_kinds_that_people_run() -> None:
    wanted = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ2_XS MXFP4 TQ2_0"
    assert {GGMLQuantizationType[name] for name in wanted.split()} <= set(DEQUANTIZED)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_a_quantised_model_comes_back_close_to_itself_in_hugging_faces_order(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    tensors = random_tensors(WIDE)
    save_gguf(tmp_path / "it.gguf", tensors, config=WIDE, encoding=kind)
    with open_tensors(Source(SourceKind.GGUF, "it", tmp_path / "it.gguf")) as opened:
        for name, values in tensors.items():
            if values.ndim == 2:
                assert opened.infos[name].encoding == kind.name
                exact = gguf.dequantize(gguf.quantize(values, kind), kind).reshape(values.shape)
                found = opened.read(name).array
                np.testing.assert_array_equal(found, exact, err_msg=name)
                np.testing.assert_allclose(found, values, rtol=0, atol=CLOSE.get(kind.name, 0.5))


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_blocks_of_each_kind_are_read_row_by_row(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Many rows, so that they are dequantised in several parts; of bytes that make no NaN."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    # One row's worth of bytes that repeats would hide a row in another's place.
    blocks = np.random.default_rng(0).integers(0x10, 0x3C, (37, 8 * block_bytes), np.uint8)
    found = read(source_with(tmp_path / "it.gguf", blocks, kind))
    assert len({row.tobytes() for row in found}) == 37
    for row, raw in zip(found, blocks, strict=True):
        np.testing.assert_array_equal(row, gguf.dequantize(raw[None], kind).reshape(-1))


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


KNOWN = {
    # scale, 32 signed bytes
    "Q8_0": (half(0.5) + bytes(range(16)) + bytes([0xFF] * 16), [0.5 * value for value in range(16)] + [-0.5] * 16),
    # scale, 16 bytes of two 4-bit numbers each, the low halves first, 8 being zero
    "Q4_0": (half(2.0) + bytes([0x9A] * 16), [2.0 * (10 - 8)] * 16 + [2.0 * (9 - 8)] * 16),
    # scale, minimum, then eight 6-bit scales 3 and minimums 1 in 12 bytes, then 4-bit numbers, halves by 32
    "Q4_K": (
        half(0.5) + half(2.0) + bytes([3] * 4 + [1] * 4 + [0x13] * 4) + bytes([0x52] * 128),
        ([0.5 * 3 * 2 - 2.0 * 1] * 32 + [0.5 * 3 * 5 - 2.0 * 1] * 32) * 4,
    ),
    # 4 low and 2 high bits of each number, 32 being zero; 16 scales, and their scale
    "Q6_K": (bytes(128) + bytes(64) + bytes([2] * 16) + half(0.5), [0.5 * 2 * -32] * 256),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_block_written_by_hand_has_the_values_that_the_format_says(tmp_path: Path, name: str) -> None:
    raw, expected = KNOWN[name]
    blocks = np.frombuffer(raw, np.uint8).reshape(1, -1)
    np.testing.assert_array_equal(
        read(source_with(tmp_path / "it.gguf", blocks, GGMLQuantizationType[name])), [expected]
    )


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_a_kind_that_cannot_be_dequantised_is_named(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    source = source_with(tmp_path / "it.gguf", np.zeros((2, block_bytes), np.uint8), kind)
    with pytest.raises(CheckpointError, match=f"has the type {kind.name}, which cannot be dequantised"):
        read(source)
