"""The command `unisono plan`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.foresight.test_ledger import change, ended
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


def test_changes_are_shown_beside_the_plan_without_them(in_process: Run) -> None:
    changes = ("bandwidth=0.01x,latency=2x", "wire=bfloat16", "rule=local_sgd:16")
    options = (*SMALL, "--nodes=4", *(f"--what-if={words}" for words in changes))
    done = in_process("plan", *options, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    (before,) = data["rows"]
    slower, wire, rule = (one["rows"][0] for one in data["what_if"])
    assert [one["change"] for one in data["what_if"]] == list(changes)
    assert data["what_if"][0]["plan"]["machine"].endswith("bandwidth=0.01x, latency=2x")
    assert slower["step"] == before["step"] < slower["step_then"]
    assert (wire["rule_then"], rule["rule_then"]) == ("bsp", "local_sgd:16")
    assert data["what_if"][1]["plan"]["rows"][0]["wire"] == "bfloat16"
    lines = in_process("plan", *options).stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("what if  "))
    assert lines[head + 1].split()[:3] == [changes[0], "bsp", "4"]


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


def test_a_starved_run_is_foretold(in_process: Run, tmp_path: Path) -> None:
    rates = "[decoding]\npixels = 1e6\n[disk]\nbandwidth = 1e6\n"
    (tmp_path / "mine.toml").write_text(f'name = "ours"\n[node]\nflops = 1e12\ncores = 4\naccelerators = 1\n{rates}')
    options = ("--model=small_convnet", "--machine=./mine.toml", "--minibatch=64", "--sample-pixels=10000")
    done = in_process("plan", *options)
    assert "starved: decoding takes 160 ms" in done.stdout
    done = in_process("plan", *options, "--sample-bytes=5000", "--from-disk")
    assert "starved: reading takes 320 ms" in done.stdout
    done = in_process("plan", *options, "--what-if=disk=4x,decoding=2x", "--sample-bytes=5000", "--from-disk")
    assert re.search(r"disk=4x,decoding=2x +bsp +1 +320.0 ms +80.0 ms +-75% +loading -240.0 ms", done.stdout)


def test_a_table_of_layers(in_process: Run) -> None:
    done = in_process("plan", *SMALL, "--nodes=1,4", "--layers")
    assert done.returncode == 0, done.stderr
    assert "layers on 1 node\n" in done.stdout
    assert re.search(r"layers on 4 nodes\n\nlayer +kind +GFLOP +weights +parallelism", done.stdout)
    data = json.loads(in_process("plan", *SMALL, "--nodes=4", "--layers", "--json").stdout)
    assert {one["parallelism"] for one in data["layers"]["4"]} == {"data"}


def test_split_layers_of_a_recipe_are_planned(in_process: Run, tmp_path: Path) -> None:
    text = '[model]\nname = "cd_dnn"\n[training]\nbatch = 256\n[parallel]\nlayers = "auto"\n'
    (tmp_path / "wide.toml").write_text(text)
    done = in_process("plan", "--recipe=wide.toml", "--machine=aws_c4_8xlarge", "--nodes=4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^bsp \+ split layers, 4 nodes: .*: column 4", done.stdout, re.MULTILINE)


def test_a_recipe_with_a_time_and_a_chart(in_process: Run, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--machine=taihulight", "--nodes=2", "--epoch-samples=1437", "--classes=10", "--chart=speedup.svg")
    done = in_process("plan", f"--recipe={recipe}", *options, "--epochs=5", "--time")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0-00:01:00\n"
    assert "<svg" in (tmp_path / "speedup.svg").read_text()
    parts = json.loads(in_process("plan", recipe, *options[:2], "--time", "--json", "--start-seconds=90").stdout)
    assert (parts["start"], parts["time"]) == (90, "0-00:02:00")
    assert parts["total"] == sum(parts[part] for part in ("start", "pack", "tuning", "steps", "tests", "checkpoints"))


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
        (("--machine=taihulight",), "give a recipe or --model NAME"),
        ((*SMALL, "digits"), "give a recipe or --model NAME"),
        (("digits", "--recipe=digits"), "digits and --recipe digits: give one recipe"),
        (("digits",), "--machine is missing: there are aws_c4_8xlarge, "),
        ((*SMALL, "--machine=nowhere"), "no machine nowhere: there are aws_c4_8xlarge"),
        ((*SMALL, "--model=resnet9000"), "resnet9000"),
        ((*SMALL, "--nodes=1,128"), "a minibatch of 64 is less than a sample for each of 128 ranks"),
        ((*SMALL, "--rule=bps"), "there is no rule 'bps'"),
        ((*SMALL, "--rule=easgd"), "rule easgd has no step that all ranks make together"),
        ((*SMALL, "--wire=float9", "--nodes=2"), "float9"),
        ((*SMALL, "--nodes=4,2"), "--nodes 4,2: give rising numbers"),
        ((*SMALL, "--nodes=1,...,8"), "--nodes 1,...,8: two numbers"),
        ((*SMALL, "--input=3x"), "--input 3x: give the shape"),
        ((*SMALL, "--what-if=speed=2x"), "--what-if speed=2x: give a factor"),
        ((*SMALL, "--what-if=wire=float9"), "there is no wire 'float9'"),
        ((*SMALL, "--slow-link=3"), "--slow-link 3: give NODE:FACTOR, a factor of 1 or more, as in 3:4"),
        ((*SMALL, "--slow-link=0:0.5"), "--slow-link 0:0.5: give NODE:FACTOR"),
        ((*SMALL, "--slow-node=a:2"), "--slow-node a:2: give NODE:FACTOR"),
        ((*SMALL, "--nodes=1,4", "--slow-node=4:2"), "--slow-node 4:2: there is no node 4; nodes are 0 to 3"),
        ((*SMALL, "--sample-pixels=0"), "--sample-pixels 0"),
        ((*SMALL, "--start-seconds=-1"), "--start-seconds -1"),
        ((*SMALL, "--ranks-per-node=0"), "--ranks-per-node 0"),
        (
            (*SMALL[:2], f"--minibatch={10**18}"),
            "--minibatch 1,000,000,000,000,000,000: the limit is 1,000,000,000,000",
        ),
        ((*SMALL[:2], "--minibatch=0"), "--minibatch 0: it is 1 at least"),
        ((*SMALL, f"--epochs={10**18}"), "the limit is 1,000,000,000,000"),
        ((*SMALL, "--start-seconds=nan"), "--start-seconds nan: it is 0 at least"),
        ((*SMALL, f"--nodes={10**17}"), "ranks are too many to price; the limit is 40,960"),
        ((*SMALL, f"--nodes={'9' * 5000}"), "give rising numbers"),
        ((*SMALL, f"--ranks-per-node={10**10}"), "10,000,000,000 ranks are too many to price; the limit is 40,960"),
        ((*SMALL, f"--input=3x{10**9}x9"), f"--input 3x{10**9}x9 has 27,000,000,000: the limit is 1,000,000,000"),
        ((*SMALL, "--optimizer=adagrad"), "there is no optimizer 'adagrad'"),
        ((*SMALL, "--time"), "--time is that of one rule"),
        (("--model=small_convnet", "--minibatch=64"), "--machine is missing: there are aws_c4_8xlarge, "),
        (("--check=none",), "there is no run in none"),
        (("--check=.",), ". has no sealed prediction"),
        ((*SMALL, "--check=."), "--check . takes the plan of that run: omit taihulight"),
    ],
)
def test_bad_input(in_process: Run, options: tuple[str, ...], words: str) -> None:
    assert_one_line_error(in_process("plan", *options), words)


PAPERS = [
    ("taihulight", "alexnet_bn", 256, 94.17),  # swCaffe, table 3: images/s of a node
    ("taihulight", "vgg16", 64, 6.21),
    ("taihulight", "vgg19", 64, 5.52),
    ("taihulight", "resnet50", 32, 5.56),
    ("taihulight", "googlenet", 128, 14.97),
    ("minsky_p100", "resnet50", 4 * 32, 90 * 1.2e6 / (48 * 60) / 64),  # DIMD 5.5: 48 minutes on 64 nodes of 4 P100
    ("mosaic_k20m", "alexnet", 128, 5120 / 31.2),  # Theano-MPI, table 3: seconds of 5,120 images
    ("mosaic_k20m", "alexnet", 32, 5120 / 36.40),
    ("mosaic_k20m", "googlenet", 32, 5120 / 134.9),
    ("copper_k80", "vgg16", 8 * 32, 5120 / 51.79),
]


@pytest.mark.parametrize(("machine", "model", "minibatch", "rate"), PAPERS)
def test_a_node_has_the_rate_that_its_paper_measured(
    in_process: Run, machine: str, model: str, minibatch: int, rate: float
) -> None:
    done = in_process("plan", f"--machine={machine}", f"--model={model}", f"--minibatch={minibatch}", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert minibatch / row["step"] == pytest.approx(rate, rel=0.005)


def test_a_rate_is_that_of_the_networks_own_input(in_process: Run) -> None:
    options = ("--model=alexnet", "--minibatch=128", "--input=3x227x227")
    assert_one_line_error(
        in_process("plan", "--machine=mosaic_k20m", *options),
        "no rate of this network on this input: plan alexnet, googlenet",
    )


def test_a_run_is_checked_part_by_part(in_process: Run, tmp_path: Path) -> None:
    seal = ended(tmp_path / "run")
    done = in_process("plan", "--check=run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^computing +40 ms +50 ms ", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("computing took 25% longer than the machine file says: node.flops")
    data = json.loads(in_process("plan", "--check=run", "--json").stdout)
    assert data["wrong"] == "computing"
    change(seal)
    assert_one_line_error(in_process("plan", "--check=run"), "run/prediction.json was changed after the run")


def test_the_page_shows_what_its_command_prints(in_process: Run) -> None:
    shown = re.search(r"```sh\nunisono (plan .*)\n```\n<!-- .* -->\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    done = in_process(*shown[1].split())
    assert done.stdout == shown[2]
