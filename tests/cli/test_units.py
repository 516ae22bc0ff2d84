import pytest

from unisono.cli.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from unisono.errors import UsageError


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


def test_formats() -> None:
    assert [format_bytes(n) for n in (7, 1024, 3 << 19, 5 << 30)] == ["7 B", "1 KiB", "1.5 MiB", "5 GiB"]
    assert [format_seconds(s) for s in (0, 4e-7, 3e-5, 0.25, 2)] == ["0 µs", "0.4 µs", "30 µs", "250 ms", "2 s"]
