import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.network import NetworkError
from unisono.plan.machines import (
    FOLDER,
    TABLES,
    EfficiencyFacts,
    MachineFacts,
    find_machine,
    machine_file,
    machine_names,
    parse_machine,
)
from unisono.plan.measured_rows import MessageRow, ProductRow


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
        ('name = "x"\n[node]\ncore = 3', "node.core is not one of cores, accelerators"),
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
