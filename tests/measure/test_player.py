"""The table of choices: rows from timings; written into a machine file and read again, for any number of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import TableError, UsageError
from unisono.measure.facts import choice_tables
from unisono.measure.links import Links
from unisono.measure.player import machine_at, rows
from unisono.measure.timing import Timing
from unisono.network import Network
from unisono.network.choice import ChoiceRow, read_table
from unisono.placement import one_rank_per_node
from unisono.plan.machines import MachineFacts, find_machine, machine_text
from unisono.tables import known

LINKS = Links(Network(5e-5, 4e-8, 1e-10, 1.6e-7), (0, 0, 1, 1))
ROWS = {"allreduce": (ChoiceRow("across nodes", "tree", 8192, median_us=2e5), ChoiceRow("across nodes", "library"))}


def exact(**medians: float) -> dict[str, Timing]:
    return {name: Timing(median, median, median) for name, median in medians.items()}


def test_fastest_is_chosen_and_adjacent_sizes_are_joined() -> None:
    timings = {
        1024: exact(ring=2.1, tree=0.9),
        4096: exact(ring=2.2, tree=1.2),
        16384: exact(ring=2.3, tree=2.9),
        65536: exact(ring=3.0),
    }
    table = rows(timings, "across nodes")
    assert [(row.up_to, row.algorithm) for row in table] == [(8192, "tree"), (None, "ring")]
    assert (table[0].median_us, table[0].interval_us) == (1.2e6, (1.2e6, 1.2e6))


def test_equally_fast_choice_is_kept() -> None:
    timings = {4: exact(tree=1.0, ring=2.0), 16: {"tree": Timing(1.01, 0.9, 1.1), "ring": Timing(1.0, 0.9, 1.1)}}
    assert [row.algorithm for row in rows(timings, "across nodes")] == ["tree"]
    timings[16]["tree"] = Timing(1.2, 1.1, 1.3)
    assert [row.algorithm for row in rows(timings, "across nodes")] == ["tree", "ring"]


@given(st.dictionaries(st.integers(1, 10**9), st.sampled_from(["a", "b", "c"]), min_size=1))
def test_every_size_is_served_by_its_fastest(fastest: dict[int, str]) -> None:
    timings = {size: exact(**{name: 1.0 if name == best else 9.0 for name in "abc"}) for size, best in fastest.items()}
    table = rows(timings, "across nodes")
    assert [row.up_to is None for row in table] == [False] * (len(table) - 1) + [True]
    for size, best in fastest.items():
        assert next(row.algorithm for row in table if row.up_to is None or size <= row.up_to) == best


def four_nodes(hosts: list[str]) -> MachineFacts:
    return MachineFacts("ours", choices=choice_tables(LINKS, hosts, ROWS))


def test_a_machine_file_has_the_table_that_auto_reads(tmp_path: Path) -> None:
    path, machine = tmp_path / "ours.toml", four_nodes(["a", "b", "c", "d"])
    path.write_text(machine_text(machine))
    assert find_machine(str(path)) == machine
    table, placement = read_table(path), one_rank_per_node(4)
    assert table.network == LINKS.network
    assert table.supernodes == {"a": 0, "b": 0, "c": 1, "d": 1}
    assert [table.choose("allreduce", placement, nbytes).algorithm for nbytes in (8192, 8193)] == ["tree", "library"]
    assert ("allreduce", "one node") in table.rows.keys() - table.measured


def test_the_table_alone_is_read_as_well(tmp_path: Path) -> None:
    machine, alone, with_machine = four_nodes(["a", "b", "c", "d"]), tmp_path / "alone.toml", tmp_path / "whole.toml"
    alone.write_text(tomli_w.dumps(known(machine.choices)))
    with_machine.write_text(machine_text(machine))
    assert read_table(alone) == read_table(with_machine)


def test_a_node_has_rows_and_no_network() -> None:
    tables = choice_tables(None, ["a"], {"allreduce": rows({4: exact(library=1.0)}, "one node")})
    row = {"where": "one node", "algorithm": "library", "median_us": 1e6, "interval_us": [1e6, 1e6]}
    assert known(tables) == {"allreduce": [row]}


def test_hosts_with_equal_names_have_no_supernodes() -> None:
    assert four_nodes(["vm"] * 4).choices.supernode == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[training]\nepochs = 3\n", r"is no machine \(it has no name.*training"),
        ("a =", r"is no machine \(Invalid value.*\); mend it, or name another file"),
        ('name = "ours"\nnodes = 3\n', r"^\S+ is no machine \(unknown key nodes"),
    ],
)
def test_a_file_that_is_no_machine_is_not_replaced(tmp_path: Path, content: str, message: str) -> None:
    (path := tmp_path / "ours.toml").write_text(content)
    with pytest.raises(UsageError, match=message):
        machine_at(path)
    path.write_text("")
    assert machine_at(path) is None
    with pytest.raises(TableError, match=r"ours.toml: this file is empty: unisono tune"):
        read_table(path)


def test_an_error_in_the_table_is_one_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\n[[choices.allreduce]]\nwhere = "here"\nalgorithm = "ring"\n')
    for read in (read_table, lambda path: find_machine(str(path))):
        with pytest.raises(UsageError, match=r"ours.toml.*choices.*allreduce row 0.where = 'here'"):
            read(path)
    path.write_text('name = "ours"\n')
    with pytest.raises(TableError, match=r"no \[choices\]: unisono tune --output .*ours.toml adds them"):
        read_table(path)
