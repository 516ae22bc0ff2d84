"""The cost of a change: two source trees measured by turns, and the ratio of their times with its interval.

python benchmarks/faults/cost.py --before OTHER/src --after src [--pairs 6] [--parts digits,collectives_2,...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from launches import Launch, tail

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE.parent / "collectives" / "switch" / "table.toml"
MODULE = (sys.executable, "-m", "unisono")
EPOCHS, LEFT_OUT = 12, 3
"""Of the digits: what is trained, and what is not counted at the beginning."""

LAB_STEPS, RATE = 8, 100_000_000
LONGEST = 600.0
"""Seconds that a command may take."""

FLAGGED = 1.05
DRAWS = 10_000


@dataclass(frozen=True)
class Setting:
    """What the parts need to know."""

    largest: int
    """Bytes of the largest allreduce."""
    hosts: int
    """Of the lab."""


@dataclass
class Part:
    """The seconds of each item, pair by pair; peers' items say what the machine alone makes of a ratio."""

    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    peers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def run(source: Path, folder: Path, command: Sequence[str], **variables: str) -> None:
    """Run a command with the package of a source tree; end this program where it fails."""
    path = os.pathsep.join([str(source), str(source.parent / "benchmarks/overlaps")])
    environment = launch_environment({**os.environ, "PYTHONPATH": path, **variables}, terminal=False)
    with Launch(command, folder, environment) as launch:
        if not launch.wait(LONGEST) or launch.process.returncode != 0:
            sys.exit(f"{source}: {' '.join(command)} ended with {launch.process.returncode}\n{tail(launch)}")


def recipe_of(source: Path) -> Path:
    """Return the recipe of the digits; older trees have it beside the package."""
    packaged = source / "unisono/recipes/digits.toml"
    return packaged if packaged.exists() else source.parent / "recipes/digits.toml"


def digits(source: Path, folder: Path, _: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Train the digits on 2 ranks; seconds of a step, the median over epochs."""
    settings = [f"training.epochs={EPOCHS}", "compute.convolutions=library", "rule.overlap=chain"]
    settings += ["exchange.bucket_megabytes=1"]
    options = [f"--set={setting}" for setting in settings]
    run(
        source,
        folder,
        [*MODULE, "train", str(recipe_of(source)), f"--run={folder / 'run'}", *options],
    )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(line["seconds"] for line in lines[LEFT_OUT:])
    return {"digits, step, 2 ranks": seconds / (lines[-1]["step"] / len(lines))}, {}


def collectives(ranks: int, source: Path, folder: Path, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """`unisono bench collectives`: what `auto` takes at each size, and its peers."""
    options = [f"--ranks={ranks}", f"--output={folder}", f"--largest={setting.largest}", "--algorithms="]
    run(source, folder, [*MODULE, "bench", "collectives", *options])
    ours, peers = {}, {}
    for row in json.loads((folder / "results.json").read_text())["sizes"]:
        for name, contender in row["contenders"].items():
            items = ours if name == "auto" else peers
            items[f"allreduce, {row['bytes']} B, {ranks} ranks, {name}"] = contender["median_us"] / 1e6
    return ours, peers


def lab(
    network: str, ratio: int, source: Path, folder: Path, setting: Setting
) -> tuple[dict[str, float], dict[str, float]]:
    """Steps of a network in the lab, whose link needs `ratio` times its (slept) computing: the median."""
    options = ["--supernodes=1", f"--hosts={setting.hosts}", f"--rate={RATE // 1_000_000}mbit"]
    output = folder / "steps.json"
    rank = [sys.executable, str(HERE / "lab_step.py"), str(output), str(RATE), str(LAB_STEPS), network, str(ratio)]
    run(source, folder, [*MODULE, "lab", *options, "--", *rank], UNISONO_TABLE=str(TABLE), OMP_NUM_THREADS="1")
    return {f"{network}, ratio {ratio}, {setting.hosts} hosts": statistics.median(json.loads(output.read_text()))}, {}


def alexnet(source: Path, folder: Path, _: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Steps of AlexNet on 2 ranks of this machine, computing for real: the median, with and without exchange."""
    output = folder / "steps.json"
    run(source, folder, [str(find_mpiexec()), "-n", "2", sys.executable, str(HERE / "alexnet_step.py"), str(output)])
    medians = {name: statistics.median(seconds) for name, seconds in json.loads(output.read_text()).items()}
    return {"AlexNet, step, 2 ranks": medians["step"]}, {"AlexNet without exchange": medians["alone"]}


Measure = Callable[[Path, Path, Setting], tuple[dict[str, float], dict[str, float]]]
PARTS: dict[str, Measure] = {
    "digits": digits,
    "collectives_2": partial(collectives, 2),
    "collectives_4": partial(collectives, 4),
    "alexnet": alexnet,
    **{
        f"lab_{network}_{ratio}": partial(lab, network, ratio) for network in ("ResNet-50", "VGG-A") for ratio in (1, 2)
    },
}


def measure(names: Sequence[str], trees: tuple[Path, Path], pairs: int, setting: Setting) -> dict[str, Part]:
    """All parts, `pairs` times, both trees by turns; who is first alternates."""
    parts = {name: Part() for name in names}
    for pair in range(pairs):
        for name, part in parts.items():
            by_tree = {}
            for tree in (0, 1) if pair % 2 == 0 else (1, 0):
                with tempfile.TemporaryDirectory(prefix="cost-") as folder:
                    by_tree[tree] = PARTS[name](trees[tree], Path(folder), setting)
            for index, into in enumerate((part.seconds, part.peers)):
                for item, before in by_tree[0][index].items():
                    into.setdefault(item, []).append((before, by_tree[1][index][item]))
            print(f"pair {pair + 1} of {pairs}: {name}: {np.exp(logs(part.seconds)[:, -1].mean()):.3f}", flush=True)
    return parts


def logs(seconds: dict[str, list[tuple[float, float]]]) -> npt.NDArray[np.float64]:
    """The logarithms of after / before: a row for each item, a column for each pair."""
    both = np.array(list(seconds.values()))
    return np.log(both[..., 1] / both[..., 0])


def drawn(rows: npt.NDArray[np.float64], seed: int = 0) -> npt.NDArray[np.float64]:
    """Means of each item over pairs that are drawn anew with replacement; the items of a run stay together."""
    pairs = rows.shape[1]
    chosen = np.random.default_rng(seed).integers(pairs, size=(DRAWS, pairs))
    return rows[:, chosen].mean(axis=2)


def line(name: str, ratio: float, draws: npt.NDArray[np.float64]) -> tuple[str, bool]:
    """A row of the table, and True where the item is flagged."""
    low, high = np.exp(np.percentile(draws, [2.5, 97.5]))
    flagged = ratio > FLAGGED and low > 1
    return f"| {name} | {ratio:.3f} | {low:.3f} to {high:.3f} | {'slower' if flagged else ''} |", flagged


def table(parts: dict[str, Part]) -> tuple[str, set[str]]:
    """The table in Markdown, and the flagged items."""
    lines, flagged = ["| what | after / before | 95% interval | |", "| --- | ---: | --- | --- |"], set()
    everything, draws_of_all, peers = [], [], []
    for index, (name, part) in enumerate(parts.items()):
        rows = logs(part.seconds)
        draws = drawn(rows, index)
        for item, row, draw in zip(part.seconds, rows, draws, strict=True):
            text, slow = line(item, float(np.exp(row.mean())), draw)
            lines.append(text)
            flagged |= {item} if slow else set()
        lines.append(line(f"**{name}, geometric mean**", float(np.exp(rows.mean())), draws.mean(axis=0))[0])
        everything.append(rows)
        draws_of_all.append(draws)
        peers += [logs(part.peers)] if part.peers else []
    mean = float(np.exp(np.concatenate(everything).mean()))
    lines.append(line("**all, geometric mean**", mean, np.concatenate(draws_of_all).mean(axis=0))[0])
    if peers:
        rows = np.concatenate(peers)
        lines.append(
            line("peers (no change of ours), geometric mean", float(np.exp(rows.mean())), drawn(rows).mean(0))[0]
        )
    return "\n".join(lines), flagged


def main() -> None:
    """Measure, measure what is flagged again, print and write; exit code 1 where an item is flagged twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a source tree: the folder that `unisono` is in")
    parser.add_argument("--after", type=Path, default=ROOT / "src", help="another")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--parts", default=",".join(PARTS), help="these, with commas between")
    parser.add_argument("--largest", type=int, default=16 << 20, help="bytes of the largest allreduce")
    parser.add_argument("--hosts", type=int, default=4, help="of the lab")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # ends the launches as well
    trees, setting = (given.before.resolve(), given.after.resolve()), Setting(given.largest, given.hosts)
    names = [name for name in given.parts.split(",") if name]
    if unknown := set(names) - PARTS.keys():
        sys.exit(f"no parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    parts = measure(names, trees, given.pairs, setting)
    text, flagged = table(parts)
    results = {"pairs": given.pairs, "first": {name: vars(part) for name, part in parts.items()}}
    if flagged:
        print(f"\n{text}\n\nmeasured again: {', '.join(sorted(flagged))}", flush=True)
        again = measure([name for name in names if flagged & parts[name].seconds.keys()], trees, given.pairs, setting)
        repeated, twice = table(again)
        text, flagged = f"{text}\n\nAgain:\n\n{repeated}", flagged & twice
        results["again"] = {name: vars(part) for name, part in again.items()}
    (HERE / "cost.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "cost.md").write_text(text + "\n")
    print(f"\n{text}\n\nslower twice: {', '.join(sorted(flagged)) or 'nothing'}")
    sys.exit(1 if flagged else 0)


if __name__ == "__main__":
    main()
