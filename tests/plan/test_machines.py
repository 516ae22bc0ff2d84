from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.network import NetworkError
from unisono.plan.machines import (
    CHANGES,
    FOLDER,
    TABLES,
    CollectiveRow,
    DecodingFacts,
    DiskFacts,
    EfficiencyFacts,
    MachineFacts,
    NetworkRow,
    ProductRow,
    TopologyFacts,
    changed_machine,
    find_machine,
    machine_file,
    machine_names,
    machine_text,
    parse_machine,
)


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
    assumption = "computing at 100% of the peak: no efficiency is known"
    both = {"efficiency.convolution": assumption, "efficiency.linear": assumption}
    machine = MachineFacts("bare", assumed={"link.latency": "a guess"})
    product = ProductRow("linear", 1, 1, 1, 1, 1e9, 1e9, 0.0)
    assert machine.assumptions == {"link.latency": "a guess", **both}
    known = replace(machine, efficiency=EfficiencyFacts(convolution=0.9), products=(product,))
    assert known.assumptions == machine.assumed
    assert replace(known, products=()).assumptions == {**machine.assumed, "efficiency.linear": assumption}
    for name in machine_names():
        assert assumption not in find_machine(name).assumptions.values()


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
        '[[network]]\nname = "alexnet"\nbatch = 4\nsamples_per_second = 1e5\n'
    )
    machine = find_machine(str(file))
    assert (machine.disk.bandwidth, machine.decoding.pixels, machine.slow_links) == (2e9, 3e8, {3: 4.0})
    assert machine.networks == (NetworkRow("alexnet", 4, 1e5),)
    assert (machine.measured["disk.bandwidth"], machine.probe.hosts) == ("how", ("a",))
    assert machine.network().overhead == 1e-6
    assert (MachineFacts("unknown").disk.bandwidth, MachineFacts("unknown").decoding.pixels) == (0, 0)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no machine cray: there are aws_c4_8xlarge, .*, or give a TOML file"
    ) as caught:
        find_machine("cray")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"no file cray\.toml, and no machine of that name: there are aws_c4_"):
        find_machine("cray.toml")


ROW = 'name = "x"\n[[collective]]\ncollective = "allreduce"\nbytes = 4\nseconds = 1\nspread = 0\nwire = "float32"'
ROW += '\nschedule = "ring"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3", "name = 3 is not a string"),
        ("", "name is missing; the whole has name, node, efficiency"),
        ('name = ""', "name is empty; give one"),
        ('name = "x"\n[nodes]', "unknown key nodes; did you mean node?"),
        ('name = "x"\n[node]\ncore = 3', "unknown key node.core; did you mean node.cores?"),
        ('name = "x"\n[node]\ncores = 3.5', "node.cores = 3.5 is not a whole number"),
        ('name = "x"\n[node]\ncores = 0', "node.cores = 0, but it has to be above 0"),
        ('name = "x"\n[node]\nflops = true', "node.flops = True is not a number"),
        ('name = "x"\n[node]\nflops = 1e-300', "node.flops = 1e-300, but it has to be at least 1"),
        ('name = "x"\n[link]\nbandwidth = 1e-300', "link.bandwidth = 1e-300, but it has to be at least 1"),
        ('name = "x"\n[efficiency]\nlinear = 5', "efficiency.linear = 5.0, but it has to be at most 1"),
        (
            'name = "x"\n[topology]\noversubscription = 4',
            "topology: oversubscription = 4 has no effect without supernode",
        ),
        ('name = "x"\nnode = 3', "node is a table of keys, not the value 3"),
        ('name = "x"\n[assumed]\n"node.flops" = "why"', 'assumed."node.flops" is a reason for a value that this file'),
        ('name = "x"\nassumed = 3', "assumed is a table of keys, not the value 3"),
        ('name = "x"\n[assumed]\n"name." = "why"', 'assumed."name." is a reason'),
        ('name = "x"\n[measured]\n"node.flops" = "how"', 'measured."node.flops" is a reason'),
        ('name = "x"\n[slow_links]\n3 = 0.5', 'slow_links."3" = 0.5, but it has to be at least 1'),
        ('name = "x"\n[slow_links]\n"01" = 2', 'slow_links."01": the key is a whole number from 0'),
        (
            'name = "x"\n[[network]]\nname = "a"\nbatch = 4',
            "network row 0.samples_per_second is missing; network row 0",
        ),
        (
            'name = "x"\n[[collective]]\ncollective = "allreduce"\nschedule = "ring"\nwire = "float32"\nnodes = 2\n'
            "ranks = 2\nbytes = 4\nseconds = 1\nspread = -1",
            "collective row 0.spread = -1.0, but it has to",
        ),
        (f'{ROW[:-5]}wring"\nnodes = 4\nranks = 4', "row 0: there is no schedule 'wring'; there are"),
        (
            f"{ROW}\nnodes = 4\nranks = 4".replace("float32", "fp32"),
            "row 0.wire = 'fp32'; it is one of float32, ",
        ),
        (f"{ROW}\nnodes = 4\nranks = 2", "collective row 0: 2 ranks are too few for 4 nodes"),
        (f"{ROW}\nnodes = 50000\nranks = 50000", "row 0.nodes = 50000, but it has to be at most 40960"),
        (
            'name = "x"\n[[network]]\nname = "a"\nbatch = 4\nsamples_per_second = inf',
            "row 0.samples_per_second = inf is out of range",
        ),
        ('name = "x"\nnetwork = 3', "network = 3 is not a list of rows; begin each with [[network]]"),
        ('name = "x"\n[[message]]\nbytes = 4\nseconds = 1\nspread = 0', "unknown key message"),
        (
            'name = "x"\n[[collective]]\ncollective = "sum"',
            "row 0.collective = 'sum'; it is one of allreduce",
        ),
        ('name = "x"\n[probe]\nhosts = [1]', "probe.hosts = 1 is not a string"),
        ('name = "x"\n[choices.ring]', "unknown key choices.ring"),
        ("name = ", "Invalid value"),
    ],
)
def test_files_that_are_no_machine(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"broken\.toml is no machine: ") as caught:
        find_machine(str(file))
    assert message in str(caught.value)


def test_slow_links_by_node() -> None:
    machine = parse_machine({"name": "x", "slow_links": {"3": 4.0, "12": 2}}, "x.toml")
    assert machine.slow_links == {3: 4.0, 12: 2.0}
    assert parse_machine({"name": "x"}, "x.toml").slow_links == {}
    for broken in (3, {"a": 4.0}, {"3": 0.5}, {"3": "4"}, {"3": True}, {"-1": 2.0}, {"1": float("inf")}):
        with pytest.raises(UsageError, match="slow_links"):
            parse_machine({"name": "x", "slow_links": broken}, "x.toml")


def test_a_machine_without_a_link_has_no_network() -> None:
    with pytest.raises(NetworkError, match="beta is 0"):
        MachineFacts("alone").network()


NUMBERS = st.floats(min_value=1e-12, max_value=1e15)
WHOLE = st.integers(min_value=1, max_value=1 << 53)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


ROWS = {
    field.name: get_args(get_type_hints(MachineFacts)[field.name])[0]
    for field in fields(MachineFacts)
    if field.default == ()
}
"""Dataclass of each list of rows, by the attribute's name."""


def values_of(kind: type[Any], complete: bool) -> st.SearchStrategy[Any]:
    """Instances of a table, which may lack values, or of a row, which lacks none."""
    strategies = {}
    named = {"nodes": st.integers(1, 8), "ranks": st.integers(8, 64), "schedule": st.sampled_from(["library", "ring"])}
    for field in fields(kind):
        some = {"int": WHOLE, "float": NUMBERS, "str": TEXTS, "tuple[str, ...]": st.lists(TEXTS).map(tuple)}[field.type]
        some = named.get(field.name, some)
        if field.metadata.get("one_of"):
            some = st.sampled_from(field.metadata["one_of"])
        least, most = (field.metadata.get(key) for key in ("at_least", "at_most"))
        if field.type == "float" and (least, most) != (None, None):
            some = st.floats(min_value=least or 1e-12, max_value=most or 1e15)
        strategies[field.name] = some if complete or field.default is MISSING else st.just(field.default) | some
    return st.builds(kind, **strategies)


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    tables = {name: draw(values_of(kind, complete=kind is TopologyFacts)) for name, kind in TABLES.items()}
    keys = [
        f"{name}.{field.name}"
        for name in TABLES
        for field in fields(TABLES[name])
        if getattr(tables[name], field.name) != field.default
    ]
    reasons = st.dictionaries(st.sampled_from(keys), TEXTS) if keys else st.just({})
    return MachineFacts(
        draw(TEXTS),
        **tables,
        assumed=draw(reasons),
        measured=draw(reasons),
        slow_links=draw(st.dictionaries(st.integers(0, 1000), st.floats(min_value=1, max_value=1e6))),
        **{name: tuple(draw(st.lists(values_of(kind, complete=True), max_size=2))) for name, kind in ROWS.items()},
    )


@given(machines())
def test_any_machine_is_read_as_it_was_written(machine: MachineFacts) -> None:
    text = machine_text(machine)
    assert parse_machine(tomllib.loads(text), "x.toml") == machine
    assert machine_text(parse_machine(tomllib.loads(text), "x.toml")) == text


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package_are_read_as_they_were_written(name: str) -> None:
    assert parse_machine(tomllib.loads(machine_text(find_machine(name))), name) == find_machine(name)


def test_what_is_not_known_is_not_written() -> None:
    assert machine_text(MachineFacts("empty")) == 'name = "empty"\n'


SOME_MACHINE = replace(find_machine("taihulight"), disk=DiskFacts(1e9), decoding=DecodingFacts(3e7))


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_is_multiplied_and_all_others_stay(name: str) -> None:
    table, key = CHANGES[name]
    changed = changed_machine(SOME_MACHINE, f"{name}=2x")
    assert getattr(getattr(changed, table), key) == 2 * getattr(getattr(SOME_MACHINE, table), key)
    assert changed.name.endswith(f", {name}=2x")
    back = changed_machine(changed, f"{name}=0.5x")
    assert replace(back, name=SOME_MACHINE.name) == SOME_MACHINE


@pytest.mark.parametrize(
    "change", ["bandwidth", "bandwidth=2", "bandwidth=0x", "bandwidth=-1x", "bandwidth=infx", "speed=2x"]
)
def test_other_words_are_refused(change: str) -> None:
    with pytest.raises(UsageError, match="give a factor above 0 for bandwidth, "):
        changed_machine(SOME_MACHINE, change)


@pytest.mark.parametrize("times", ["1e300x", "1e-300x"])
def test_a_value_is_not_multiplied_beyond_its_limits(times: str) -> None:
    with pytest.raises(UsageError, match=rf"--what-if flops={times}: NodeFacts: flops = .* (out of range|at least 1)"):
        changed_machine(SOME_MACHINE, f"flops={times}")


def test_a_value_that_is_not_there_is_not_multiplied() -> None:
    with pytest.raises(UsageError, match=r"has no node.memory_bandwidth, so it cannot be multiplied"):
        changed_machine(find_machine("cori_aries"), "memory_bandwidth=2x")


def test_rates_of_networks_are_multiplied_without_the_peak() -> None:
    machine = find_machine("mosaic_k20m")
    faster = changed_machine(machine, "flops=2x")
    assert [row.samples_per_second for row in faster.networks] == [328.2, 281.4, 75.9]
    with pytest.raises(UsageError, match=r"has no node.flops, so it cannot be multiplied"):
        changed_machine(replace(machine, networks=()), "flops=2x")


def test_an_uplink_of_no_supernode_is_not_multiplied() -> None:
    with pytest.raises(UsageError, match="--what-if oversubscription=4x: oversubscription = 4 has no effect without"):
        changed_machine(find_machine("minsky_p100"), "oversubscription=4x")


def test_rows_of_another_machine_are_left_out() -> None:
    product = ProductRow("linear", 1, 1, 1, 1, 1e9, 2e9, 0.0)
    collective = CollectiveRow("allreduce", "ring", "float32", 2, 2, 4, 1.0, 0.0)
    measured = replace(SOME_MACHINE, products=(product,), collectives=(collective,))
    faster, networks = changed_machine(measured, "flops=2x"), SOME_MACHINE.networks
    assert faster.products == (replace(product, forward=2e9, backward=4e9),)
    assert [row.samples_per_second for row in faster.networks] == [2 * row.samples_per_second for row in networks]
    assert faster.collectives == measured.collectives
    wider = changed_machine(measured, "bandwidth=2x")
    assert (wider.products, wider.collectives) == ((product,), ())
    within = replace(measured, collectives=(collective, replace(collective, nodes=1)))
    assert changed_machine(within, "latency=2x").collectives == within.collectives[1:], "links do not change a node"
    assert changed_machine(within, "memory_bandwidth=2x").collectives == ()
