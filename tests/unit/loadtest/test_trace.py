from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.loadtest.trace import Entry, read_trace


def trace(tmp_path: Path, text: str, name: str = "trace.jsonl", unit: str = "s") -> list[Entry]:
    file = tmp_path / name
    file.write_text(text)
    return read_trace(file, unit=unit)


def test_json_lines_are_read_in_the_order_of_their_moments_from_the_first_on(tmp_path: Path) -> None:
    text = """{"timestamp": 12.5, "input_tokens": 30, "output_tokens": 3}

{"timestamp": 10, "input_tokens": 10, "output_tokens": 1}
"""
    assert trace(tmp_path, text) == [Entry(0.0, 10, 1), Entry(2.5, 30, 3)]


def test_mooncakes_names_and_milliseconds_are_known(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": [1]}\n' * 2
    text += '{"timestamp": 1500, "input_length": 8, "output_length": 6, "hash_ids": []}'
    assert trace(tmp_path, text, unit="ms")[-1] == Entry(1.5, 8, 6)


def test_azures_csv_with_dates_is_known(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = trace(tmp_path, text, name="azure.csv")
    assert first == Entry(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no request"),
        ("nonsense", "line 1: 'nonsense' is not JSON"),
        ("[1]", "line 1: [1] is not an object"),
        ('{"timestamp": 1, "input_tokens": 3}', "row 1: none of output_tokens, output_length"),
        (
            '{"timestamp": "soon", "input_tokens": 3, "output_tokens": 1}',
            "row 1: 'soon' is neither a number nor a date",
        ),
        ('{"timestamp": 1, "input_tokens": 0, "output_tokens": 1}', "input tokens 0 is under the limit of 1"),
        ('{"timestamp": 1, "input_tokens": 3, "output_tokens": "x"}', "output tokens 'x' is not a whole number"),
        ('{"timestamp": 1, "input_tokens": 3, "output_tokens": 1.5}', "output tokens 1.5 is not a whole number"),
        ('{"timestamp": 1, "input_tokens": Infinity, "output_tokens": 1}', "input tokens inf is not a whole number"),
        ('{"timestamp": NaN, "input_tokens": 3, "output_tokens": 1}', "nan is not a moment"),
    ],
)
def test_a_row_that_makes_no_sense_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trace(tmp_path, text)
    assert named in raised.value.message


def test_whole_numbers_may_be_written_as_fractions(tmp_path: Path) -> None:
    assert trace(tmp_path, '{"timestamp": 1, "input_tokens": 3.0, "output_tokens": 2}') == [Entry(0.0, 3, 2)]


def test_a_csv_that_cannot_be_split_into_fields_is_said(tmp_path: Path) -> None:
    text = "timestamp,input_tokens,output_tokens\n1,2," + "9" * 200_000
    with pytest.raises(ConfigError, match=r"trace\.csv cannot be read: field larger than field limit"):
        trace(tmp_path, text, name="trace.csv")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.csv cannot be read"):
        read_trace(tmp_path / "gone.csv", unit="s")
