import pytest

from unisono.errors import UsageError
from unisono.formats import format_bytes, format_duration, format_seconds, markdown_table, parse_bytes, parse_seconds


def test_formats() -> None:
    assert [format_bytes(n) for n in (7, 1024, 3 << 19, 5 << 30)] == ["7 B", "1 KiB", "1.5 MiB", "5 GiB"]
    assert [format_seconds(s) for s in (0, 4e-7, 3e-5, 0.25, 2)] == ["0 µs", "0.4 µs", "30 µs", "250 ms", "2 s"]
    assert [format_duration(s) for s in (59.94, 59.96, 60, 3599.6)] == ["59.9 s", "60.0 s", "1:00 min", "1:00:00 h"]


def test_a_table_has_as_many_cells_in_every_row_and_escapes_its_own_character() -> None:
    assert markdown_table(["name", "a", "b"], [["one|two", "1", "2"]]) == [
        "| name | a | b |",
        "| --- | ---: | ---: |",
        "| one&#124;two | 1 | 2 |",
    ]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("1.5MiB", 3 << 19),
        (" 1GB", 10**9),
        ("1 GiB", 1 << 30),
        ("7b", 7),
    ],
)
def test_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "-4", "4 K", "1e6", "0", "0.3B"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(UsageError, match=f"--bytes {text}: write sizes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30us", 3e-5), ("2.5ms", 2.5e-3), ("0.01", 0.01), ("2s", 2.0), ("800ns", 8e-7)]
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--latency ") == seconds


def test_no_seconds() -> None:
    with pytest.raises(UsageError, match="--late 3:5h: write a time"):
        parse_seconds("5h", "--late 3:")
