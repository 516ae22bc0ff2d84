"""The command `unisono plan`."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.foresight.test_ledger import change, ended
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.cli.plan import node_counts, paused_collection, plan
from unisono.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"

SMALL = ("--model=small_convnet", "--machine=taihulight")


@pytest.mark.parametrize("rule", ["bsp", "sharded", "local_sgd"])
def test_a_table_of_nodes(in_process: Run, rule: str) -> None:
    done = in_process("plan", *SMALL, "--nodes=1,2,4,...,16", f"--set=rule.name={rule}")
    assert done.returncode == 0, done.stderr
    assert re.findall(rf"^ *{rule} +(\d+) ", done.stdout, re.MULTILINE) == ["1", "2", "4", "8", "16"]
    assert f"{rule}: more nodes pay up to" in done.stdout
    assert "assumed, link.latency: 1 us" in done.stdout


def test_accelerators_are_those_of_the_machine(in_process: Run) -> None:
    def planned(machine: str, device: str) -> CompletedProcess[str]:
        return in_process("plan", "digits", "--machine", machine, "--set", f"compute.device={device}")

    assert planned("minsky_p100", "cuda").returncode == planned("cori_fdr", "auto").returncode == 0
    done = planned("cori_fdr", "cuda")
    assert done.returncode == 2
    assert re.search(r"compute.device = 'cuda', but .* has no accelerators: plan with --set", done.stderr)


def test_numbers_of_nodes() -> None:
    assert node_counts("4") == (4,)
    assert node_counts("1,3,4") == (1, 3, 4)
    assert node_counts("1,2,4,...,20") == (1, 2, 4, 8, 16)
    assert node_counts("1,10,...,1000") == (1, 10, 100, 1000)


@pytest.mark.parametrize("nodes", ["0", "2,2", "x", "1,...,8", "2,3,...,8", "1,2,...,", "1,2,4,...,3"])
def test_no_numbers_of_nodes(nodes: str) -> None:
    with pytest.raises(UsageError, match=f"--nodes {nodes}: "):
        node_counts(nodes)


def test_changes_are_shown_beside_the_plan_without_them(in_process: Run) -> None:
    changes = ("bandwidth=0.01x,latency=2x", "exchange.wire=bfloat16", "rule.name=local_sgd")
    options = (*SMALL, "--nodes=4", *(f"--what-if={change}" for change in changes))
    done = in_process("plan", *options, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    (before,) = data["rows"]
    slower, wire, rule = (entry["rows"][0] for entry in data["what_if"])
    assert [entry["change"] for entry in data["what_if"]] == list(changes)
    assert data["what_if"][0]["plan"]["machine"].endswith("bandwidth=0.01x, latency=2x")
    assert slower["step"] == before["step"] < slower["step_then"]
    assert (wire["rule_then"], rule["rule_then"]) == ("bsp", "local_sgd")
    assert data["what_if"][1]["plan"]["rows"][0]["wire"] == "bfloat16"
    lines = in_process("plan", *options).stdout.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("what if  "))
    assert lines[head + 1].split()[:3] == [changes[0], "bsp", "4"]


def test_a_slow_link_is_named_with_what_it_costs(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'name = "ours"\n[node]\nflops = 1e12\n[link]\nbandwidth = 1e7\n[slow_links]\n"2" = 3.0\n"90" = 2.0\n'
    )
    done = in_process("plan", "--model=small_convnet", "--nodes=1,4", "--machine=./slow.toml", "--json")
    assert done.returncode == 0, done.stderr
    one_node, four_nodes, *_ = json.loads(done.stdout)["rows"]
    assert four_nodes["bottleneck"].startswith("node 2's link, 3 times slower: ")
    assert "times as fast; communication" in four_nodes["bottleneck"]
    assert "node" not in one_node["bottleneck"]


def test_a_starved_run_is_foretold(in_process: Run, tmp_path: Path) -> None:
    rates = "[decoding]\npixels = 1e6\n[disk]\nbandwidth = 1e6\n"
    (tmp_path / "mine.toml").write_text(f'name = "ours"\n[node]\nflops = 1e12\ncores = 4\naccelerators = 1\n{rates}')
    options = ("--model=small_convnet", "--machine=./mine.toml", "--set=samples.pixels=10000")
    done = in_process("plan", *options)
    assert "starved: decoding takes 160 ms" in done.stdout
    streamed = ("--set=samples.bytes=5000", "--set=data.storage=streamed")
    done = in_process("plan", *options, *streamed)
    assert "starved: reading takes 320 ms" in done.stdout
    done = in_process("plan", *options, "--what-if=disk=4x,decoding=2x", *streamed)
    assert re.search(r"disk=4x,decoding=2x +bsp +1 +320.0 ms +80.0 ms +-75% +loading -240.0 ms", done.stdout)


def test_a_table_of_layers(in_process: Run) -> None:
    done = in_process("plan", *SMALL, "--nodes=1,4", "--layers")
    assert done.returncode == 0, done.stderr
    assert "layers on 1 node\n" in done.stdout
    assert re.search(r"layers on 4 nodes\n\nlayer +kind +GFLOP +weights +parallelism", done.stdout)
    data = json.loads(in_process("plan", *SMALL, "--nodes=4", "--layers", "--json").stdout)
    assert {layer["parallelism"] for layer in data["layers"]["4"]} == {"data"}


def test_split_layers_of_a_recipe_are_planned(in_process: Run, tmp_path: Path) -> None:
    text = '[model]\nname = "cd_dnn"\n[training]\nbatch = 256\n[parallel]\nlayers = "auto"\n[samples]\nshape = 440\n'
    (tmp_path / "wide.toml").write_text(text)
    done = in_process("plan", "wide.toml", "--machine=aws_c4_8xlarge", "--nodes=4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^bsp \+ split layers, 4 nodes: .*: column 4", done.stdout, re.MULTILINE)


def test_a_recipe_with_a_wall_time_and_a_chart(in_process: Run, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--machine=taihulight", "--nodes=2", "--set=training.epochs=5")
    done = in_process("plan", recipe, *options, "--chart=speedup.svg")
    assert done.returncode == 0, done.stderr
    assert "wall time for sbatch --time, 5 epochs: 0-00:01:00 (bsp, 2 nodes)" in done.stdout
    assert "<svg" in (tmp_path / "speedup.svg").read_text()


def test_a_network_of_your_own_on_a_machine_of_your_own(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "planned_nets.py").write_text(
        "from torch import nn\n"
        "def wide(classes, channels):\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, classes))\n"
        "class Reads(nn.Module):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x\n"
        "def reads(classes, channels):\n    return nn.Sequential(nn.Flatten(), Reads())\n"
    )
    (tmp_path / "mine.toml").write_text('name = "ours"\n[node]\nflops = 1e12\n[link]\nbandwidth = 1e9\n')
    bare = ("--machine=./mine.toml", "--set=training.batch=8", "--nodes=1,2")
    options = (*bare, "--set=samples.shape=3x4x4")
    done = in_process("plan", "--model=planned_nets:wide", *options)
    assert done.returncode == 0, done.stderr
    assert "planned_nets:wide, 8 samples a step, on ours" in done.stdout
    assert "\nassumed, samples.classes: 1,000, those of ImageNet; else --set samples.classes=N\n" in done.stdout
    known = in_process("plan", "--model=planned_nets:wide", *options, "--set=samples.classes=3")
    assert "samples.classes" not in known.stdout
    elsewhere = in_process("plan", "--model=planned_nets:wide", *bare, "--set=data.pack=none", "--set=data.size=4")
    assert "samples of 3x4x4, by data.size: none is not here" in elsewhere.stdout
    assert_one_line_error(in_process("plan", "--model=planned_nets:wide", *bare), "--set samples.shape=3x32x32")
    assert_one_line_error(
        in_process("plan", "--model=planned_nets:reads", *options), "layer '1', Reads, cannot be traced"
    )


NOT_WITH_CHECK = ("--chart=x.svg", "--nodes=4", "--layers", "--what-if=bandwidth=2x", "--set=training.batch=8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--machine=taihulight",), "give a recipe or --model NAME"),
        ((*SMALL, "digits"), "give a recipe or --model NAME"),
        (("digits",), "--machine is missing: there are aws_c4_8xlarge, "),
        ((*SMALL, "--machine=nowhere"), "no machine nowhere: there are aws_c4_8xlarge"),
        ((*SMALL, "--model=resnet9000"), "resnet9000"),
        ((*SMALL, "--nodes=1,128"), "a minibatch of 64 is less than a sample for each of 128 ranks"),
        ((*SMALL, "--set=rule.name=bps"), "there is no rule 'bps'"),
        ((*SMALL, "--set=rule.name=easgd"), "rule easgd has no step that all ranks make together"),
        ((*SMALL, "--set=exchange.wire=float9", "--nodes=2"), "float9"),
        ((*SMALL, "--nodes=4,2"), "--nodes 4,2: give rising numbers"),
        ((*SMALL, "--nodes=1,...,8"), "--nodes 1,...,8: two numbers"),
        ((*SMALL, "--set=samples.shape=3x"), "samples.shape = '3x'; give the shape"),
        ((*SMALL, "--set=samples.shape=8x8"), "samples.shape of an image is channels x height x width, not 8x8: layer"),
        ((*SMALL, "--what-if=speed=2x"), "--what-if speed=2x: give a factor"),
        ((*SMALL, "--what-if=exchange.wrie=int8"), "did you mean exchange.wire?"),
        ((*SMALL, "--set=samples.pixels=-1"), "samples.pixels = -1, but it has to be at least 0"),
        ((*SMALL, "--ranks-per-node=0"), "--ranks-per-node 0"),
        ((*SMALL, "--set=training.batch=0"), "training.batch = 0, but it has to be at least 1"),
        ((*SMALL, f"--set=training.epochs={10**19}"), "is out of range"),
        ((*SMALL, f"--nodes={10**17}"), "ranks are too many to price; the limit is 40,960"),
        ((*SMALL, f"--nodes={'9' * 5000}"), "give rising numbers"),
        ((*SMALL, f"--ranks-per-node={10**10}"), "10,000,000,000 ranks are too many to price; the limit is 40,960"),
        ((*SMALL, "--set=optimizer.name=adagrad"), "it is one of sgd, "),
        (("--model=small_convnet",), "--machine is missing: there are aws_c4_8xlarge, "),
        (("--check=none",), "there is no run in none"),
        (("--check=.",), ". has no sealed prediction"),
        *((("--check=.", option), f"omit {option.partition('=')[0]}") for option in NOT_WITH_CHECK),
        *(((*SMALL, f"--worthwhile={share}"), f"--worthwhile {share}") for share in ("nan", "inf", "-1", "0")),
        ((*SMALL, "--check=."), "--check . takes the plan of that run: omit taihulight"),
    ],
)
def test_bad_input(in_process: Run, options: tuple[str, ...], message: str) -> None:
    assert_one_line_error(in_process("plan", *options), message)


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
    done = in_process("plan", f"--machine={machine}", f"--model={model}", f"--set=training.batch={minibatch}", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert minibatch / row["step"] == pytest.approx(rate, rel=0.005)


def test_a_rate_is_that_of_the_networks_own_input(in_process: Run) -> None:
    options = ("--model=alexnet", "--set=training.batch=128", "--set=samples.shape=3x227x227")
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


def test_collection_is_paused_inside_and_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), paused_collection():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_what_is_alive_at_the_end_is_walked_by_no_collection() -> None:
    before = gc.get_freeze_count()
    with paused_collection():
        kept = [[index] for index in range(100)]
    assert gc.get_freeze_count() >= before + len(kept)


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_plan_pauses_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    states = list[bool]()

    def find_machine(_: str) -> None:
        states.append(gc.isenabled())
        raise UsageError("enough")

    monkeypatch.setattr("unisono.plan.machines.find_machine", find_machine)
    with pytest.raises(UsageError, match="enough"):
        plan(machine="taihulight", model="vgg_a")
    assert states == [False]
    assert gc.isenabled()
