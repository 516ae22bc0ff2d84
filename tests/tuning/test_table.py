from pathlib import Path

import pytest

from unisono.errors import TableError
from unisono.tuning.table import COLLECTIVES, PLACES, Choice, read_table

DEFAULT = (Path(__file__).parents[2] / "src/unisono/tuning/default.toml").read_text()


def test_the_default_table() -> None:
    table = read_table()
    assert table.choose("allreduce", "one node", 4) == Choice("flat", "windows")
    assert table.choose("allreduce", "one node", 65536) == Choice("flat", "windows")
    assert table.choose("allreduce", "one node", 65537) == Choice("direct", "windows")
    assert table.choose("allreduce", "across nodes", 4) == Choice("library", "library")
    assert table.choose("allreduce", "across nodes", 1 << 30) == Choice("ring", "messages")
    assert {(collective, place) for collective in COLLECTIVES for place in PLACES} == set(table.rows)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"flat"', '"flut"', "row 0: unknown algorithm 'flut'; there are library, ring, halving, "),
        ("up_to = 65536", "up_to = -1", "row 0: up_to = -1; it is a whole number that grows"),
        ("up_to = 65536", "limit = 65536", "row 0: unknown key 'limit'"),
        ("up_to = 65536\n", "", "row 1 comes after the row without up_to"),
        (
            'where = "one node"\nalgorithm = "direct"\n',
            'where = "one node"\nup_to = 9\nalgorithm = "direct"\n',
            "up_to = 9",
        ),
        ('where = "one node"\nalgorithm', 'where = "one node"\nup_to = 99999\nalgorithm', "a last row without up_to"),
        ('transport = "windows"', 'transport = "pigeons"', "unknown transport 'pigeons'; there are windows, messages"),
        ('where = "one node"', 'where = "here"', "where = 'here'; it is one of one node, across nodes"),
        ("[[allreduce]]", "[[allredude]]", "unknown collective 'allredude'"),
        ('transport = "messages"', 'transport = "windows"', "windows do not reach across nodes"),
        ("[[part_reduce]]", "[[part_reduce]", "Expected"),
    ],
)
def test_an_edited_table_gets_one_clear_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "table.toml"
    assert old in DEFAULT
    path.write_text(DEFAULT.replace(old, new, 1))
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_schedule_is_chosen_only_for_what_it_offers(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        DEFAULT.replace(
            '[[part_reduce]]\nwhere = "one node"\nalgorithm = "direct"',
            '[[part_reduce]]\nwhere = "one node"\nalgorithm = "halving"',
        )
    )
    with pytest.raises(TableError, match="unknown algorithm 'halving'; there are library, ring, direct"):
        read_table(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        read_table(tmp_path / "none.toml")
