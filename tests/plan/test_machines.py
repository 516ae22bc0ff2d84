from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.network import NetworkError
from unisono.plan.machines import (
    FOLDER,
    ROWS,
    TABLES,
    EfficiencyFacts,
    MachineFacts,
    NodeFacts,
    find_machine,
    machine_file,
    machine_names,
    machine_text,
    parse_factors,
    parse_machine,
    parse_rows,
    parse_table,
)
from unisono.plan.measured_rows import CollectiveRow, MessageRow, ProbeFacts, ProductRow


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package(name: str) -> None:
    machine = find_machine(name)
    assert machine.name
    assert machine.link.total_bandwidth > 0
    assert all(0 < share <= 1 for share in dataclasses.astuple(machine.efficiency))


@pytest.mark.parametrize("name", machine_names())
def test_each_value_has_a_source_or_is_assumed(name: str) -> None:
    text, machine = (FOLDER / f"{name}.toml").read_text(encoding="utf-8"), find_machine(name)
    table = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[+(\w+)\]+", line):
            table = heading[1]
        elif table in TABLES and (value := re.match(r"(\w+) = ", line)):
            sourced = re.search(r"# .*(PCL-DNN|DIMD|Theano-MPI|swCaffe) ", line)
            assert sourced or f"{table}.{value[1]}" in machine.assumed, line
        elif line.startswith("samples_per_second"):
            assert re.search(r"# (DIMD|Theano-MPI|swCaffe) .*\d", line), line


def test_computing_at_the_peak_is_assumed_in_words() -> None:
    """Without [efficiency], and without products or networks of which the rate is known."""
    words = "computing at 100% of the peak: no efficiency is known"
    both = {"efficiency.convolution": words, "efficiency.linear": words}
    machine = MachineFacts("bare", assumed={"link.latency": "a guess"})
    product = ProductRow("linear", 1, 1, 1, 1, 1e9, 1e9, 0.0)
    assert machine.assumptions == {"link.latency": "a guess", **both}
    known = replace(machine, efficiency=EfficiencyFacts(convolution=0.9), products=(product,))
    assert known.assumptions == machine.assumed
    assert replace(known, products=()).assumptions == {**machine.assumed, "efficiency.linear": words}
    for name in machine_names():
        assert words not in find_machine(name).assumptions.values()


def test_the_ratios_of_table_1() -> None:
    """PCL-DNN: 336 and 1,336 FLOPs in the time of a byte."""
    for name, ratio in (("cori_fdr", 336), ("aws_c4_8xlarge", 1336)):
        machine = find_machine(name)
        assert machine.node.flops / machine.link.bandwidth == pytest.approx(ratio, rel=0.002)


def test_the_worked_example() -> None:
    machine = find_machine("taihulight")
    network = machine.network()
    assert network.beta == pytest.approx(83e-12, rel=0.01)
    assert network.crossing_beta(machine.topology.supernode) == pytest.approx(333e-12, rel=0.01)
    assert find_machine("minsky_p100").network().beta == 1 / 25e9  # both adapters
    assert find_machine("minsky_p100").network().uplink_beta is None


def test_a_machine_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[node]\nflops = 1e12\n[link]\nbandwidth = 1\n')
    mine = find_machine(str(file))
    assert machine_file(str(file)) == file
    assert machine_file("taihulight") == FOLDER / "taihulight.toml"
    assert (mine.node.flops, mine.link.bandwidth, mine.link.adapters) == (1e12, 1.0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.name = "yours"  # type: ignore[misc]


def test_a_machine_that_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    file.write_text(
        'name = "measured"\n[link]\nbandwidth = 1e9\noverhead = 1e-6\n'
        "[disk]\nbandwidth = 2e9\n[decoding]\npixels = 3e8\n"
        '[slow_links]\n3 = 4\n[measured]\n"disk.bandwidth" = "how"\n[probe]\nhosts = ["a"]\n'
        "[[message]]\nbytes = 4\nseconds = 1e-5\nspread = 0\n"
    )
    machine = find_machine(str(file))
    assert (machine.disk.bandwidth, machine.decoding.pixels, machine.slow_links) == (2e9, 3e8, {3: 4.0})
    assert machine.messages == (MessageRow(4, 1e-5, 0.0),)
    assert (machine.measured["disk.bandwidth"], machine.probe.hosts) == ("how", ("a",))
    assert machine.network().overhead == 1e-6
    assert (MachineFacts("unknown").disk.bandwidth, MachineFacts("unknown").decoding.pixels) == (0, 0)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no machine cray: there are aws_c4_8xlarge, .*, or give a TOML file"
    ) as caught:
        find_machine("cray")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 3", "name = 3"),
        ('name = "x"\n[nodes]', "nodes is not one of assumed, choices, collective, decoding, disk, efficiency, link"),
        ('name = "x"\n[node]\ncore = 3', "memory_bandwidth; did you mean cores?"),
        ('name = "x"\n[node]\ncores = 3.5', "node.cores = 3.5; it is a whole number above 0"),
        ('name = "x"\n[node]\nflops = true', "node.flops = True; it is a number above 0"),
        ('name = "x"\nnode = 3', "node = 3; it is a table of cores"),
        ('name = "x"\n[assumed]\n"node.flops" = "why"', 'assumed."node.flops"'),
        ('name = "x"\nassumed = 3', "assumed = 3; it is a table of reasons"),
        ('name = "x"\n[assumed]\n"name." = "why"', 'assumed."name."'),
        ('name = "x"\n[measured]\n"node.flops" = "how"', 'measured."node.flops"'),
        ('name = "x"\n[slow_links]\n3 = 0.5', 'slow_links."3" = 0.5; it is a factor of 1 or more'),
        ('name = "x"\n[[message]]\nbytes = 4', "message row 0 has no seconds; it has bytes, seconds, spread"),
        ('name = "x"\n[choices.ring]', "choices: unknown collective 'ring'"),
        ("name = ", "Invalid value"),
    ],
)
def test_files_that_are_no_machine(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"broken\.toml is no machine: ") as caught:
        find_machine(str(file))
    assert words in str(caught.value)


def test_slow_links_by_node() -> None:
    found = parse_machine({"name": "x", "slow_links": {"3": 4.0, "12": 2}})
    assert found.slow_links == {3: 4.0, 12: 2.0}
    assert parse_machine({"name": "x"}).slow_links == {}
    for broken in (3, {"a": 4.0}, {"3": 0.5}, {"3": "4"}, {"3": True}, {"-1": 2.0}):
        with pytest.raises(UsageError, match="slow_links"):
            parse_machine({"name": "x", "slow_links": broken})


def test_a_machine_without_a_link_has_no_network() -> None:
    with pytest.raises(NetworkError, match="beta is 0"):
        MachineFacts("alone").network()


MESSAGE = {"bytes": 4, "seconds": 1, "spread": 0}


def test_a_table_has_defaults_and_a_row_has_none() -> None:
    assert parse_table("node", NodeFacts, {"cores": 2, "flops": 3}) == NodeFacts(cores=2, flops=3.0)
    assert parse_table("probe", ProbeFacts, {"hosts": ["a", "b"]}).hosts == ("a", "b")
    assert parse_rows("message", MessageRow, [MESSAGE]) == (MessageRow(4, 1.0, 0.0),)
    assert parse_factors("slow_links", {"3": 4}) == {3: 4.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, "message row 1 = 3; it is a table of bytes, seconds, spread"),
        ({"bytes": 4, "seconds": 1}, "message row 1 has no spread; it has bytes, seconds, spread"),
        (MESSAGE | {"bytes": 0}, "message row 1.bytes = 0; it is a whole number above 0"),
        (MESSAGE | {"bytes": 4.0}, "message row 1.bytes = 4.0; it is a whole number above 0"),
        (MESSAGE | {"spread": -1}, "message row 1.spread = -1; it is a number of 0 or more"),
        (MESSAGE | {"seconds": float("inf")}, "message row 1.seconds = inf; it is a number above 0"),
        (MESSAGE | {"speed": 1}, "message row 1.speed is not one of bytes"),
    ],
)
def test_rows_that_do_not_fit(row: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rows("message", MessageRow, [MESSAGE, row])
    assert words in str(caught.value)


def test_texts_are_not_empty_and_one_of_those_that_are_known() -> None:
    row = {"schedule": "ring", "wire": "float32", "nodes": 2, "ranks": 2} | MESSAGE
    assert parse_rows("collective", CollectiveRow, [{"collective": "allreduce"} | row])
    with pytest.raises(UsageError, match=r"row 0\.collective = 'sum'; it is one of allreduce, reduce_scatter"):
        parse_rows("collective", CollectiveRow, [{"collective": "sum"} | row])
    with pytest.raises(UsageError, match=r"row 0\.schedule = ''; it is text"):
        parse_rows("collective", CollectiveRow, [{"collective": "allreduce"} | row | {"schedule": ""}])
    with pytest.raises(UsageError, match=r"probe\.hosts = \[1\]; it is a list of texts"):
        parse_table("probe", ProbeFacts, {"hosts": [1]})
    with pytest.raises(UsageError, match=r"message = 3; it is a list of rows: begin each with \[\[message\]\]"):
        parse_rows("message", MessageRow, 3)


@pytest.mark.parametrize("values", [3, {"x": 2}, {"01": 2}, {"-1": 2}, {"1": 0.5}, {"1": True}, {"1": float("inf")}])
def test_factors_that_do_not_fit(values: Any) -> None:
    with pytest.raises(UsageError, match="slow_links"):
        parse_factors("slow_links", values)


NUMBERS = st.floats(min_value=1e-12, max_value=1e15)
WHOLE = st.integers(min_value=1, max_value=1 << 53)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def values_of(kind: type[Any], complete: bool) -> st.SearchStrategy[Any]:
    """Instances of a table, which may lack values, or of a row, which lacks none."""
    found = {}
    for one in fields(kind):
        some = {"int": WHOLE, "float": NUMBERS, "str": TEXTS, "tuple[str, ...]": st.lists(TEXTS).map(tuple)}[one.type]
        if one.metadata.get("one_of"):
            some = st.sampled_from(one.metadata["one_of"])
        if one.metadata.get("least") == 0:
            some |= st.just(0.0)
        found[one.name] = some if complete or one.default is MISSING else st.just(one.default) | some
    return st.builds(kind, **found)


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    tables = {name: draw(values_of(kind, complete=False)) for name, kind in TABLES.items()}
    keys = [
        f"{name}.{one.name}"
        for name in TABLES
        for one in fields(TABLES[name])
        if getattr(tables[name], one.name) != one.default
    ]
    reasons = st.dictionaries(st.sampled_from(keys), TEXTS) if keys else st.just({})
    return MachineFacts(
        draw(TEXTS),
        **tables,
        assumed=draw(reasons),
        measured=draw(reasons),
        slow_links=draw(st.dictionaries(st.integers(0, 1000), st.floats(min_value=1, max_value=1e6))),
        **{
            f"{name}s": tuple(draw(st.lists(values_of(kind, complete=True), max_size=2))) for name, kind in ROWS.items()
        },
    )


@given(machines())
def test_any_machine_is_read_as_it_was_written(machine: MachineFacts) -> None:
    text = machine_text(machine)
    assert parse_machine(tomllib.loads(text)) == machine
    assert machine_text(parse_machine(tomllib.loads(text))) == text


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package_are_read_as_they_were_written(name: str) -> None:
    assert parse_machine(tomllib.loads(machine_text(find_machine(name)))) == find_machine(name)


def test_what_is_not_known_is_not_written() -> None:
    assert machine_text(MachineFacts("empty")) == 'name = "empty"\n'
