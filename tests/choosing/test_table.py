from pathlib import Path

import pytest

from unisono.choosing.priced import Choice
from unisono.choosing.table import COLLECTIVES, DEFAULT, read_table
from unisono.errors import TableError
from unisono.placement import apart, regular

TEXT = DEFAULT.read_text()


def test_the_default_table() -> None:
    table = read_table()
    here = regular(1, 1, 4)
    assert table.choose("allreduce", here, 4) == Choice("flat", "windows")
    assert table.choose("allreduce", here, 65536) == Choice("flat", "windows")
    assert table.choose("allreduce", here, 65537) == Choice("direct", "windows")
    assert {(collective, "one node") for collective in COLLECTIVES} == set(table.rows)


def test_across_nodes_the_cheapest_is_taken_until_something_was_measured(tmp_path: Path) -> None:
    assert read_table().choose("allreduce", apart(8), 4) == Choice("multicolor", "messages")
    assert read_table().choose("allreduce", apart(8), 1 << 28).algorithm in ("ring", "halving", "direct")
    path = tmp_path / "table.toml"
    path.write_text(
        '[[allreduce]]\nwhere = "across nodes"\nup_to = 100\nalgorithm = "hierarchical/library"\n'
        '[[allreduce]]\nwhere = "across nodes"\nalgorithm = "pipeline"\nmedian_us = 3.0\ninterval_us = [1.0, 4.0]\n'
        "[network]\nalpha = 1e-4\nbeta = 4e-8\nuplink_beta = 4e-8\n"
        '[[supernode]]\nhosts = ["a", "b"]\n[[supernode]]\nhosts = ["c"]\n'
    )
    table = read_table(path)
    assert table.choose("allreduce", apart(8), 100) == Choice("hierarchical/library", "library")
    assert table.choose("allreduce", apart(8), 101) == Choice("pipeline", "messages")
    assert table.choose("allreduce", regular(1, 1, 4), 4) == Choice("flat", "windows")
    assert table.choose("part_reduce", apart(8), 1 << 20).transport == "messages"
    assert table.network.uplink_beta == 4e-8
    assert table.supernodes == {"a": 0, "b": 0, "c": 1}


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
        ('where = "one node"', 'where = "across nodes"', "windows, which do not reach across nodes"),
        ("[[allreduce]]", "[network]\nalpha = 1\n[[allreduce]]", "network: needs alpha and beta"),
        ("[[allreduce]]", "[network]\nalpha = -1\nbeta = 1\n[[allreduce]]", "alpha = -1; it is a number of seconds"),
        ("[[allreduce]]", "[network]\nalpha = 1\nbeta = 0\n[[allreduce]]", "beta is 0"),
        ("[[allreduce]]", "[[supernode]]\nhosts = 3\n[[allreduce]]", "supernode 0: needs hosts"),
        (
            "[[allreduce]]",
            '[[supernode]]\nhosts = ["a"]\n[[supernode]]\nhosts = ["a"]\n[[allreduce]]',
            "supernode 1: host 'a' is in supernode 0 too",
        ),
        ("[[part_reduce]]", "[[part_reduce]", "Expected"),
    ],
)
def test_an_edited_table_gets_one_clear_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "table.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(TableError) as caught:
        read_table(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_schedule_is_chosen_only_for_what_it_offers(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        TEXT.replace(
            '[[part_reduce]]\nwhere = "one node"\nalgorithm = "direct"',
            '[[part_reduce]]\nwhere = "one node"\nalgorithm = "halving"',
        )
    )
    with pytest.raises(TableError, match="unknown algorithm 'halving'; there are library, ring, direct"):
        read_table(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        read_table(tmp_path / "none.toml")


def test_rows_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text("allreduce = 3\n")
    with pytest.raises(TableError, match="allreduce is no list of rows"):
        read_table(path)
