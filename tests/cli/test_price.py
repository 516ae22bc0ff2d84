"""The command `unisono price`, and the options that it shares with `unisono simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.network import price, shaped
from unisono.network.choice import read_table
from unisono.placement import regular
from unisono.schedules import find

PLAIN = ("--ranks", "4", "--rate", "10gbit", "--latency", "30us", "--bytes", "64KiB")


def test_json(in_process: Run) -> None:
    done = in_process("price", *PLAIN, "--algorithms", "ring", "--json")
    assert done.returncode == 0, done.stderr
    placement, network = regular(1, 4, 1), shaped(10e9, 4, 1, 30e-6)
    seconds = float(price(find("ring", placement).allreduce, placement, network, 65536))
    bound = 1.5 * 65536 * 8e-10
    assert json.loads(done.stdout) == {
        "collective": "allreduce",
        "ranks": 4,
        "nodes": 4,
        "supernodes": 1,
        "wire": None,
        "network": {
            "alpha": 3e-05,
            "beta": 8e-10,
            "gamma": 2.5e-10,
            "uplink_beta": 2e-10,
            "within_alpha": 2e-6,
            "within_beta": 2e-10,
            "overhead": 0.0,
        },
        "left_out": {},
        "sizes": [
            {
                "bytes": 65536,
                "bound_seconds": pytest.approx(bound),
                "auto": "direct",
                "schedules": [
                    {
                        "schedule": "ring",
                        "seconds": seconds,
                        "rounds": 6,
                        "sent_bytes": 98304.0,
                        "share_of_bound": pytest.approx(bound / seconds),
                    }
                ],
            }
        ],
    }


def test_tables(in_process: Run) -> None:
    done = in_process("price", *PLAIN[:-1], "4KiB,1MiB", "--supernodes", "2")
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert head.startswith(
        "allreduce, 4 ranks on 4 nodes in 2 supernodes: links of 10 Gbit/s, latency 30 µs, sums at 4"
    )
    assert [line.split(":")[0] for line in lines if "bound of the links" in line] == ["4 KiB", "1 MiB"]
    assert sum(line.endswith("  auto") for line in lines) == 2
    assert any(line.startswith("halving/round-robin ") for line in lines)
    assert lines[-1].startswith("left out: hierarchical (all 15), leader (all 15): with one rank per node")


def test_the_machine_has_supernodes(in_process: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[link]\nbandwidth = 1e9\n[topology]\nsupernode = 4\noversubscription = 2\n')
    options = ("price", "--ranks=8", f"--machine={path}", "--algorithms=tree", "--json")
    results = json.loads(in_process(*options).stdout)
    assert (results["supernodes"], results["network"]["beta"], results["network"]["uplink_beta"]) == (2, 1e-9, 5e-10)
    assert json.loads(in_process(*options, "--supernodes=1").stdout)["supernodes"] == 1
    assert json.loads(in_process("price", "--ranks=4", "--machine=taihulight", "--json").stdout)["supernodes"] == 1


def test_a_table_has_the_network_and_the_choices(in_process: Run, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        '[network]\nalpha = 1e-3\nbeta = 1e-7\n[[allreduce]]\nwhere = "across nodes"\nalgorithm = "library"\n'
    )
    done = in_process("price", "--ranks=4", f"--table={path}", "--bytes=1MiB")
    assert "latency 1 ms" in done.stdout
    assert "auto takes the MPI library, which has no schedule to price" in done.stdout
    assert read_table(path).network.alpha == 1e-3


def test_an_unknown_network_is_said_to_be_one(in_process: Run) -> None:
    assert "an unknown network" in in_process("price", "--ranks=4").stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--collective=gather"], "there is no collective 'gather'; there are allreduce, "),
        (["--algorithms=rong"], "there is no schedule 'rong'; there are "),
        (["--collective=broadcast", "--algorithms=ring"], "the schedule 'ring' has no broadcast"),
        (["--bytes=4Kibi"], "--bytes 4Kibi: write sizes like 4096, 4KiB or 64MB"),
        (["--bytes=0"], "--bytes 0: write sizes"),
        (["--bytes=0.5"], "of whole bytes"),
        (["--ranks=0"], "--ranks 0: the number of ranks must be at least 1"),
        (["--ranks=1"], "a collective of 1 rank on one node passes no link"),
        (["--ranks=100000"], "100,000 ranks are too many to price; the limit is 40,960"),
        ([f"--ranks={10**18}"], "1,000,000,000,000,000,000 ranks are too many to price; the limit is 40,960"),
        (["--bytes=2000000000GiB"], "--bytes 2000000000GiB: the limit is 1 EiB, 2^60 bytes"),
        (["--rate=1gbit", f"--latency={'9' * 400}"], "the limit is 1,000,000,000 s"),
        (["--ranks-per-node=3"], "--ranks-per-node 3: 4 ranks do not fill nodes of as many"),
        (["--supernodes=3"], "--supernodes 3: 4 nodes do not spread evenly over 3 supernodes"),
        (["--machine=abacus"], "no machine abacus: there are aws_c4_8xlarge, "),
        (["--table=/nowhere.toml"], "/nowhere.toml: "),
        (["--machine=taihulight", "--rate=1gbit"], "--machine and --rate each describe the network; give one"),
        (["--machine=taihulight", "--latency=1us"], "--latency 1us is for a network given by --rate"),
        (["--rate=10"], "--rate 10: write a rate like 200mbit"),
        (["--rate=0gbit"], "--rate 0gbit: write a rate like 200mbit"),
        (["--machine=./linkless.toml"], "--machine ./linkless.toml: it has no bandwidth in [link]"),
        (["--rate=1gbit", "--latency=soon"], "--latency soon: write a time like 30us"),
        (["--rate=1gbit", "--oversubscribe=0"], "--oversubscribe 0: give a number above 0"),
        (["--rate=1gbit", "--oversubscribe=4"], "--oversubscribe 4 is for several supernodes; add --supernodes"),
        (["--wire=float8"], "there is no wire 'float8'; there are float32, "),
        (["--wire=int8", "--algorithms=halving"], "halving: the wire 'int8' encodes blocks"),
        (["--wire=bfloat16", "--collective=broadcast"], "a wire encodes allreduce, reduce_scatter, all_gather; broad"),
    ],
)
@pytest.mark.parametrize("command", ["price", "simulate"])
def test_bad_input(in_process: Run, tmp_path: Path, command: str, arguments: list[str], message: str) -> None:
    (tmp_path / "linkless.toml").write_text('name = "x"\n')
    ranks = [] if arguments[0].startswith("--ranks=") else ["--ranks=4"]
    assert_one_line_error(in_process(command, *ranks, *arguments), message)
