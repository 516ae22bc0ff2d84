import pytest

from unisono.cli.units import parse_bytes, parse_seconds
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
