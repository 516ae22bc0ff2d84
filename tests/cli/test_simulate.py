"""The command `unisono simulate`; `test_price` has the options that both share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

PLAIN = ("simulate", "--ranks", "4", "--rate", "1gbit", "--bytes", "64KiB", "--algorithms", "ring")


def test_json(in_process: Run) -> None:
    done = in_process(*PLAIN, "--slow-link", "1:4", "--late", "2:5ms", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert set(results) == {
        *("collective", "ranks", "nodes", "supernodes", "wire", "network", "left_out"),
        *("slow_nodes", "late_ranks", "sizes"),
    }
    assert (results["slow_nodes"], results["late_ranks"]) == ({"1": 4.0}, {"2": 0.005})
    (size,) = results["sizes"]
    (row,) = size["schedules"]
    assert set(size) == {"bytes", "bound_seconds", "auto", "schedules"}
    assert set(row) == {
        *("schedule", "seconds", "price_seconds", "share_of_bound", "exact", "bottleneck", "delays", "ends"),
    }
    assert row["exact"] is True
    assert row["seconds"] == max(row["ends"]) > row["price_seconds"] + 0.005
    assert len(row["ends"]) == 4
    assert sum(delay["seconds"] for delay in row["delays"]) == pytest.approx(row["seconds"])
    late = {"cause": "late ranks", "place": "rank 2", "seconds": 0.005}
    assert late in row["delays"]
    assert "late ranks (rank 2)" in row["bottleneck"]


def test_a_slow_link_is_that_of_the_node(in_process: Run) -> None:
    done = in_process(*PLAIN, "--ranks-per-node", "2", "--slow-link", "3:4", "--json")
    assert json.loads(done.stdout)["slow_nodes"] == {"1": 4.0}


@pytest.mark.parametrize(
    ("options", "slow"),
    [((), {"1": 4.0}), (("--slow-link", "0:2"), {"0": 2.0, "1": 4.0}), (("--slow-link", "1:1"), {})],
)
def test_the_slow_links_of_a_machine_count_unless_an_option_names_them(
    in_process: Run, tmp_path: Path, options: tuple[str, ...], slow: dict[str, float]
) -> None:
    facts = 'name = "ours"\n[link]\nbandwidth = 1.25e9\nlatency = 25e-6\n[slow_links]\n"1" = 4.0\n"7" = 3.0\n'
    (tmp_path / "ours.toml").write_text(facts)
    simulated = "simulate", "--ranks", "4", "--bytes", "64KiB", "--algorithms", "ring", "--json"
    done = in_process(*simulated, "--machine", str(tmp_path / "ours.toml"), *options)
    assert done.returncode == 0, done.stderr
    factors = json.loads(done.stdout)["slow_nodes"]
    assert {node: times for node, times in factors.items() if times > 1} == slow


def test_tables(in_process: Run) -> None:
    done = in_process(*PLAIN, "--slow-link", "1:8")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("ring "))
    assert " ms" in row
    sentence = next(line for line in done.stdout.splitlines() if line.startswith("ring: "))
    assert "ends last, its time is" in sentence
    assert "node 1" in sentence
    assert "ends: " in sentence


def test_too_many_messages_leave_a_schedule_out(in_process: Run) -> None:
    options = ("simulate", "--ranks=512", "--bytes=64MiB", "--rate=10gbit")
    done = in_process(*options, "--algorithms=flat,halving")
    assert done.returncode == 0, done.stderr
    assert "left out: flat: 64 MiB: about " in done.stdout
    assert "halving: rank" in done.stdout
    assert_one_line_error(in_process(*options, "--algorithms=flat"), "too many to simulate")


def test_very_many_ranks_are_left_to_the_price(in_process: Run) -> None:
    options = ("simulate", "--ranks=4096", "--machine=taihulight", "--bytes=8MiB", "--algorithms=halving")
    assert_one_line_error(in_process(*options), "4,096 ranks are too many to simulate; the limit is 2,048")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slow-link=4:2"], "--slow-link 4:2: there is no rank 4; ranks are 0 to 3"),
        (["--slow-link=1"], "--slow-link 1: write RANK:FACTOR, such as 3:4"),
        (["--slow-link=1:fast"], "--slow-link 1:fast: write RANK:FACTOR, such as 3:4"),
        (["--slow-link=1:0.5"], "node 1: its link is 0.5 times slower; give 1 or more"),
        ([f"--ranks={10**18}"], "1,000,000,000,000,000,000 ranks are too many to price; the limit is 40,960"),
        ([f"--slow-link={'9' * 5000}:2"], ": there is no rank 9999"),
        (["--late=9:1"], "--late 9:1: there is no rank 9; ranks are 0 to 3"),
        (["--late=-1:1"], "--late -1:1: write RANK:SECONDS, such as 3:5ms"),
        (["--late=1:soon"], "--late 1:soon: write a time like 30us"),
    ],
)
def test_bad_input(in_process: Run, arguments: list[str], message: str) -> None:
    assert_one_line_error(in_process(*PLAIN, *arguments), message)
