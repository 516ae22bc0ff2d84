"""The command `unisono plan`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.usage_errors import assert_one_line_error

Run = Callable[..., subprocess.CompletedProcess[str]]

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"

SMALL = ("--model=small_convnet", "--machine=taihulight", "--minibatch=64")


def test_a_table_of_rules_and_nodes(in_process: Run) -> None:
    done = in_process("plan", *SMALL, "--nodes=1,2,4,...,16", "--rule=bsp,sharded,local_sgd:16")
    assert done.returncode == 0, done.stderr
    for rule in ("bsp", "sharded", "local_sgd:16"):
        assert re.findall(rf"^ *{rule} +(\d+) ", done.stdout, re.MULTILINE) == ["1", "2", "4", "8", "16"]
        assert f"{rule}: more nodes pay up to" in done.stdout
    assert "assumed, link.latency: 1 us" in done.stdout


def test_json_of_a_changed_machine(in_process: Run) -> None:
    steps = []
    for what_if in ((), ("--what-if=bandwidth=0.01x", "--what-if=latency=2x")):
        done = in_process("plan", *SMALL, "--nodes=4", "--json", *what_if)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        steps.append(data["rows"][0]["step"])
    assert data["machine"].endswith("bandwidth=0.01x, latency=2x")
    assert steps[0] < steps[1]


def test_slow_links_and_nodes_are_named_with_what_they_cost(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'name = "ours"\n[node]\nflops = 1e12\n[link]\nbandwidth = 1e7\n[slow_links]\n"2" = 3.0\n"90" = 2.0\n'
    )
    options = ("--model=small_convnet", "--minibatch=64", "--nodes=1,4", "--machine=./slow.toml", "--json")
    rows = {}
    for more in ((), ("--slow-link=1:9",), ("--slow-node=3:50",), ("--simulate",)):
        done = in_process("plan", *options, *more)
        assert done.returncode == 0, done.stderr
        rows[more] = json.loads(done.stdout)["rows"]
    assert rows[()][1]["bottleneck"].startswith("node 2's link, 3 times slower: ")
    assert "times as fast; communication" in rows[()][1]["bottleneck"]
    assert "node" not in rows[()][0]["bottleneck"]
    assert rows["--slow-link=1:9",][1]["bottleneck"].startswith("node 1's link (the slowest of 2), 9 times slower: ")
    assert rows["--slow-node=3:50",][1]["computing"] == 50 * rows[()][1]["computing"]
    assert rows["--slow-node=3:50",][0] == rows[()][0]
    assert rows["--simulate",][1]["bottleneck"].startswith("node 2's link, 3 times slower: ")
    assert rows["--simulate",][1]["step"] != rows[()][1]["step"]


def test_a_recipe_with_a_time_and_a_chart(in_process: Run, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--machine=taihulight", "--nodes=2", "--epoch-samples=1437", "--classes=10", "--chart=speedup.svg")
    done = in_process("plan", f"--recipe={recipe}", *options, "--epochs=5", "--time")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0-00:01:00\n"
    assert "<svg" in (tmp_path / "speedup.svg").read_text()


def test_a_network_of_your_own_on_a_machine_of_your_own(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "planned_nets.py").write_text(
        "from torch import nn\n"
        "def wide(classes, channels):\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, classes))\n"
        "class Reads(nn.Module):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x\n"
        "def reads(classes, channels):\n    return nn.Sequential(nn.Flatten(), Reads())\n"
    )
    (tmp_path / "mine.toml").write_text('name = "ours"\n[node]\nflops = 1e12\n[link]\nbandwidth = 1e9\n')
    options = ("--machine=./mine.toml", "--minibatch=8", "--input=3x4x4", "--nodes=1,2")
    done = in_process("plan", "--model=planned_nets:wide", *options)
    assert done.returncode == 0, done.stderr
    assert "planned_nets:wide, 8 samples a step, on ours" in done.stdout
    assert_one_line_error(
        in_process("plan", "--model=planned_nets:reads", *options), "layer '1', Reads, cannot be traced"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--machine=taihulight",), "give --model NAME or --recipe FILE"),
        ((*SMALL, "--recipe=digits"), "give --model NAME or --recipe FILE"),
        ((*SMALL, "--machine=nowhere"), "no machine nowhere: there are aws_c4_8xlarge"),
        ((*SMALL, "--model=resnet9000"), "resnet9000"),
        ((*SMALL, "--nodes=1,128"), "a minibatch of 64 is less than a sample for each of 128 ranks"),
        ((*SMALL, "--rule=bps"), "there is no rule 'bps'"),
        ((*SMALL, "--rule=easgd"), "rule easgd has no step of its own"),
        ((*SMALL, "--wire=float9", "--nodes=2"), "float9"),
        ((*SMALL, "--nodes=4,2"), "--nodes 4,2: give rising numbers"),
        ((*SMALL, "--nodes=1,...,8"), "--nodes 1,...,8: two numbers"),
        ((*SMALL, "--input=3x"), "--input 3x: give the shape"),
        ((*SMALL, "--what-if=speed=2x"), "--what-if speed=2x: give a factor"),
        ((*SMALL, "--slow-link=3"), "--slow-link 3: give NODE:FACTOR, a factor of 1 or more, as in 3:4"),
        ((*SMALL, "--slow-link=0:0.5"), "--slow-link 0:0.5: give NODE:FACTOR"),
        ((*SMALL, "--slow-node=a:2"), "--slow-node a:2: give NODE:FACTOR"),
        ((*SMALL, "--nodes=1,4", "--slow-node=4:2"), "--slow-node 4:2: there is no node 4; nodes are 0 to 3"),
        ((*SMALL, "--ranks-per-node=0"), "--ranks-per-node 0"),
        ((*SMALL, "--optimizer=adagrad"), "there is no optimizer 'adagrad'"),
        ((*SMALL, "--time"), "--time is that of one rule"),
    ],
)
def test_bad_input(in_process: Run, options: tuple[str, ...], words: str) -> None:
    assert_one_line_error(in_process("plan", *options), words)


def test_the_page_shows_what_its_command_prints(in_process: Run) -> None:
    shown = re.search(r"```sh\nunisono (plan .*)\n```\n<!-- .* -->\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    done = in_process(*shown[1].split())
    assert done.stdout == shown[2]
