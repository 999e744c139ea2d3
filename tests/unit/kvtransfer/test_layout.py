import math

import msgspec
import pytest

from paceline.checkpoint.model_config import ModelConfig
from paceline.errors import FingerprintMismatch
from paceline.kvtransfer.layout import ITEM_BYTES, Fingerprint, KvLayout
from paceline.kvtransfer.region import Region

SMOLLM2 = ModelConfig(
    architecture="llama",
    name="SmolLM2-135M-Instruct",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_tokens=8192,
    norm_eps=1e-5,
    rope_theta=100000.0,
    tied_embeddings=True,
    eos_token_ids=(2,),
)
PRINT = Fingerprint.of(KvLayout.of(SMOLLM2, dtype="float32"), model="SmolLM2", weights_digest="ab12")


def test_a_block_of_smollm2_in_float32_has_the_bytes_that_were_counted_by_hand() -> None:
    layout = KvLayout.of(SMOLLM2, dtype="float32")
    assert layout.block_bytes == 30 * 3 * 2 * 16 * 64 * 4 == 737_280
    assert layout.geometry(7) == (7, 3, 30, 2, 16, 64)


def test_a_block_of_llama_3_8b_in_bfloat16_is_two_mebibytes_and_a_head_a_quarter() -> None:
    group = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert (group.block_bytes, group.head_bytes) == (2 * 2**20, 256 * 2**10)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_blocks_bytes_are_its_geometry_times_the_item(dtype: str) -> None:
    group = KvLayout(layers=3, kv_heads=2, head_dim=8, dtype=dtype)
    assert group.block_bytes == math.prod(group.geometry(1)) * ITEM_BYTES[dtype]


def test_scales_lie_behind_each_heads_numbers() -> None:
    bare = KvLayout(layers=2, kv_heads=4, head_dim=8, dtype="float8_e4m3fn")
    scaled = KvLayout(layers=2, kv_heads=4, head_dim=8, dtype="float8_e4m3fn", scale_bytes=64)
    assert scaled.head_bytes == bare.head_bytes + 64
    assert scaled.block_bytes == bare.block_bytes + 4 * 64


def test_a_block_is_a_groups_part_of_sixteen_tokens() -> None:
    gemma = msgspec.structs.replace(SMOLLM2, num_layers=18, windows=(512, 512, 512, 512, 512, None) * 3)
    layout = KvLayout.of(gemma, dtype="float32")
    assert (layout.layers, layout.windows) == (3, (None, 512, 512, 512, 512, 512))
    assert layout.block_bytes * 6 == 18 * 3 * 2 * 16 * 64 * 4


def test_ranks_split_whole_heads_or_refuse() -> None:
    assert KvLayout.of(SMOLLM2, dtype="float32", ranks=3).kv_heads == 1
    with pytest.raises(ValueError, match="3 KV heads do not split over 2 ranks"):
        KvLayout.of(SMOLLM2, dtype="float32", ranks=2)


@pytest.mark.parametrize("wrong", [{"dtype": "int3"}, {"layers": 0}, {"head_dim": -1}, {"scale_bytes": -1}])
def test_an_impossible_group_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.convert({"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", **wrong}, KvLayout)


def test_equal_fingerprints_agree_also_after_a_trip_over_the_wire() -> None:
    PRINT.check(msgspec.msgpack.decode(msgspec.msgpack.encode(PRINT), type=Fingerprint))
    PRINT.check(msgspec.json.decode(msgspec.json.encode(PRINT), type=Fingerprint))


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_every_field_that_differs_is_named_with_both_values(field: str) -> None:
    ours = getattr(PRINT, field)
    theirs = {int: lambda: ours + 1, str: lambda: ours + "x", tuple: lambda: (*ours, 512)}[type(ours)]()
    with pytest.raises(FingerprintMismatch) as caught:
        PRINT.check(msgspec.structs.replace(PRINT, **{field: theirs}))
    assert caught.value.message == f"{field} differs: {ours!r} here, {theirs!r} at the peer"


def test_a_region_knows_where_its_blocks_lie_and_hides_its_address() -> None:
    region = Region(0x7F1234560000, 10, 4096)
    assert region.address_of(3) == 0x7F1234560000 + 3 * 4096
    assert region.num_bytes == 40_960
    assert str(0x7F1234560000) not in repr(region)


@pytest.mark.parametrize(
    ("first", "count", "inside"),
    [(0, 10, True), (9, 1, True), (9, 2, False), (10, 1, False), (-1, 1, False), (0, 0, False)],
)
def test_a_region_holds_runs_that_lie_wholly_inside(first: int, count: int, inside: bool) -> None:
    assert Region(1, 10, 1).holds(first, count) is inside


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_region_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a region"):
        Region(*wrong)
