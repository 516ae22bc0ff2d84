"""The plan of a lab: its hosts, its links, and the commands that build it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import LabError
from unisono.lab.plan import HEAD_ADDRESS, HOME, Command, Lab, commands, hosts_file, parse_rate, parse_slow_host

TWO = Lab(supernodes=2, hosts=2, rate=200_000_000, oversubscribe=4)
ONE = Lab(supernodes=1, hosts=3, rate=1_000_000_000)

labs = st.builds(
    Lab,
    supernodes=st.integers(1, 20),
    hosts=st.integers(1, 20),
    rate=st.integers(10**7, 10**10),
    oversubscribe=st.floats(0.5, 100),
    ranks_per_host=st.integers(1, 8),
)


def shapes(lab: Lab) -> dict[str, str]:
    """The rate of every interface that is shaped; the hosts' are called h0.eth0, ..."""
    rates = {}
    for command in commands(lab):
        if "tbf" in command:
            host = command[1].removeprefix(f"--net={HOME}/").removesuffix("/net") + "." if "nsenter" in command else ""
            rates[host + command[command.index("dev") + 1]] = command[command.index("rate") + 1]
    return rates


def starting(lab: Lab, *beginning: str) -> list[Command]:
    return [command for command in commands(lab) if command[: len(beginning)] == beginning]


def test_two_supernodes_hang_on_a_core_by_uplinks() -> None:
    ends = {f"port{k}": "200000000bit" for k in range(4)} | {f"h{k}.eth0": "200000000bit" for k in range(4)}
    uplinks = {f"{way}{s}": "100000000bit" for way in ("up", "down") for s in range(2)}
    assert shapes(TWO) == ends | uplinks
    bridges = [command[3] for command in starting(TWO, "ip", "link", "add") if command[-1] == "bridge"]
    assert bridges == ["switch0", "switch1", "core"]
    masters = {command[3]: command[-1] for command in starting(TWO, "ip", "link", "set") if "master" in command}
    assert masters == {
        "up0": "switch0",
        "down0": "core",
        "up1": "switch1",
        "down1": "core",
        "port0": "switch0",
        "port1": "switch0",
        "port2": "switch1",
        "port3": "switch1",
    }
    assert starting(TWO, "ip", "address") == [("ip", "address", "add", "10.99.0.1/16", "dev", "core")]


def test_a_slow_host_has_a_slower_link_both_ways() -> None:
    slow = shapes(replace(TWO, slow_hosts=((1, 4.0),)))
    assert slow == shapes(TWO) | {"port1": "50000000bit", "h1.eth0": "50000000bit"}


@pytest.mark.parametrize("text", ["1", "1:", ":2", "-1:2", "1:-2", "h1:2"])
def test_slow_hosts_are_a_number_and_a_factor(text: str) -> None:
    assert parse_slow_host("1:2.5") == (1, 2.5)
    with pytest.raises(LabError, match=f"--slow-host {text}: write the host's number and a factor, such as 3:4"):
        parse_slow_host(text)


def test_one_supernode_is_one_switch_without_uplinks() -> None:
    assert shapes(ONE) == {name: "1000000000bit" for k in range(3) for name in (f"port{k}", f"h{k}.eth0")}
    bridges = [command[3] for command in starting(ONE, "ip", "link", "add") if command[-1] == "bridge"]
    assert bridges == ["switch0"]
    assert starting(ONE, "ip", "address") == [("ip", "address", "add", "10.99.0.1/16", "dev", "switch0")]


def test_the_commands_of_one_host() -> None:
    inside = ("nsenter", f"--net={HOME}/h1/net", f"--uts={HOME}/h1/uts", f"--ipc={HOME}/h1/ipc", "--")
    assert [" ".join(command[5:]) for command in commands(TWO) if command[:5] == inside] == [
        "ip link set lo up",
        "ip address add 10.99.1.2/16 dev eth0",
        "tc qdisc add dev eth0 root tbf rate 200000000bit burst 14781b limit 1514781b",
        "ip link set eth0 addrgenmode none gso_max_size 12500 up",
        "sh -c echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
        "sh -c echo 4096 250000 250000 > /proc/sys/net/ipv4/tcp_rmem",
    ]


@given(labs)
def test_every_host_has_a_name_and_an_address_of_its_own(lab: Lab) -> None:
    members = lab.members
    assert len(members) == lab.supernodes * lab.hosts
    assert len({host.name for host in members}) == len({host.address for host in members}) == len(members)
    assert HEAD_ADDRESS not in {host.address for host in members}
    for host in members:
        assert host.number == host.supernode * lab.hosts + host.within
        assert all(1 <= int(part) <= 254 for part in host.address.split(".")[2:])


@given(labs)
def test_a_bucket_holds_a_train_and_a_queue_every_window(lab: Lab) -> None:
    ranks = lab.supernodes * lab.hosts * lab.ranks_per_host
    there = lab.ranks_per_host * lab.hosts
    for link in (lab.link(0), lab.uplink):
        packets = -(-link.train // 1448)
        assert link.bucket >= link.train + 66 * packets
        assert link.train <= 65_536
    assert lab.link(0).queue >= min((ranks - lab.ranks_per_host) * lab.ranks_per_host * lab.window, 2**31)
    assert lab.uplink.queue >= min(there * (ranks - there) * lab.window, 2**31)


def test_the_hosts_file_keeps_what_was_there() -> None:
    assert hosts_file(ONE, "127.0.0.1 localhost\n") == (
        "127.0.0.1 localhost\n10.99.0.1 labhead\n10.99.1.1 h0\n10.99.1.2 h1\n10.99.1.3 h2\n"
    )


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200mbit", 200_000_000), ("1.5gbit", 1_500_000_000), ("640Kbit", 640_000), ("0.1mbit", 100_000)],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "200", "mbit", "-1mbit", "1e3mbit", "200mbits", "1.mbit", "nanmbit"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(LabError, match="write a rate like 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"supernodes": 0}, "--supernodes 0: a lab has 1 to 254"),
        ({"ranks_per_host": 10**10}, "ranks are too many for a lab on one machine; the limit is 4,096"),
        ({"hosts": 255}, "--hosts 255: a lab has 1 to 254"),
        ({"ranks_per_host": 0}, "--ranks-per-host 0: a host runs at least 1 rank"),
        ({"oversubscribe": 0}, "--oversubscribe 0: give 0.01 to 1000"),
        ({"oversubscribe": float("nan")}, "--oversubscribe nan: give 0.01 to 1000"),
        ({"rate": 99_999}, "--rate of 99999 bits per second: a lab's links can have 100kbit to 100gbit"),
        ({"rate": 10**12}, "--rate of 1000000000000 bits per second"),
        ({"slow_hosts": ((4, 2.0),)}, "--slow-host 4:2: there is no host 4; hosts are 0 to 3"),
        ({"slow_hosts": ((1, 0.5),)}, "--slow-host 1:0.5: the factor is 1 to 2000"),
        ({"rate": 10**6, "oversubscribe": 100}, "uplinks of 20000 bits per second: raise --rate"),
    ],
)
def test_bad_labs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        Lab(**{"supernodes": 2, "hosts": 2, "rate": 200_000_000, **change})
