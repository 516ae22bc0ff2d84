"""Runs the benchmark of the torch.distributed backend beside gloo: on one node, and in the lab on both topologies.

python benchmarks/torch_backend/run.py [PART ...]       the lab needs root and iproute2; about 40 minutes on 2 cores
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ddp_communication import ALONE, CONTENDERS, MODELS

from unisono.launch import find_mpiexec

HERE = Path(__file__).parent
TABLES = HERE.parent / "collectives"
LABS = {"switch": (1, 8), "supernodes": (2, 4)}
"""Supernodes, and hosts of each."""

MOST = {"one_node": 100_000_000, "switch": 16 << 20, "supernodes": 16 << 20}
"""Bytes of the largest tensor."""

STEPS = {"one_node": 7, "switch": 3, "supernodes": 3}
"""Training steps that are timed."""

ROUNDS, STEPS_PER_ROUND = 5, 9
"""Rounds of the contenders for communication, and steps that each takes in a round."""


def start(place: str, program: str, *arguments: str) -> None:
    """Run a program on the ranks of a place: two of this node, or eight hosts of the lab."""
    command = [sys.executable, str(HERE / program), *arguments]
    environment = dict(os.environ)
    if place == "one_node":
        launch = [str(find_mpiexec()), "-n", "2", *command]
    else:
        supernodes, hosts = LABS[place]
        options = [f"--supernodes={supernodes}", f"--hosts={hosts}", "--rate=200mbit", "--oversubscribe=4"]
        launch = [sys.executable, "-m", "unisono", "lab", *options, "--", *command]
        environment["UNISONO_TABLE"] = str(TABLES / place / "table.toml")
    subprocess.run(launch, env=environment, check=True)


def operations(place: str) -> None:
    """All operations and sizes."""
    start(place, "operations.py", str(HERE / f"operations_{place}.json"), str(MOST[place]))


def step(place: str) -> None:
    """A step of AlexNet."""
    start(place, "ddp_step.py", str(HERE / f"ddp_{place}.json"), str(STEPS[place]))


def communication(place: str) -> None:
    """What communication costs an unmodified DistributedDataParallel, by several contenders."""
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "round.json")
        for index in range(ROUNDS):
            for model in MODELS:
                for name in (*CONTENDERS[index % len(CONTENDERS) :], *CONTENDERS[: index % len(CONTENDERS)]):
                    start(place, "ddp_communication.py", str(path), model, name, str(STEPS_PER_ROUND))
                    measured = json.loads(path.read_text())
                    row = models.setdefault(model, {"gradient_bytes": measured["gradient_bytes"], "seconds": {}})
                    times = row["seconds"].setdefault(name, {"step": [], "in all": []})
                    for kind, seconds in measured["seconds"].items():
                        times[kind].append(statistics.median(seconds))
                print(f"{model}: round {index}", flush=True)
    for row in models.values():
        row["seconds"] = {name: {**row["seconds"][name]} for name in CONTENDERS}
    result = {"ranks": 2, "nodes": 1, "models": models}
    (HERE / f"communication_{place}.json").write_text(json.dumps(result, indent=1) + "\n")


def ratio(row: dict[str, Any]) -> float:
    """How many times as fast as gloo."""
    return float(row["gloo"][0] / row["unisono"][0])


def summary() -> str:
    """The ratios as tables in Markdown."""
    lines = ["# torch.distributed by unisono beside gloo", "", "Median time of gloo / median time of unisono.", ""]
    for path in sorted(HERE.glob("operations_*.json")):
        facts = json.loads(path.read_text())
        rows = facts["rows"]
        names = list(dict.fromkeys(row["operation"] for row in rows))
        lines += [f"## {path.stem.removeprefix('operations_')}: {facts['ranks']} ranks on {facts['nodes']} nodes", ""]
        lines += ["| bytes | " + " | ".join(names) + " |", "| ---: |" + " ---: |" * len(names)]
        for nbytes in dict.fromkeys(row["bytes"] for row in rows):
            each = {row["operation"]: ratio(row) for row in rows if row["bytes"] == nbytes}
            lines.append(f"| {nbytes:,} | " + " | ".join(f"{each[name]:.2f}" for name in names) + " |")
        lines.append("")
    lines += ["## A step of AlexNet, batch 16 a rank, DistributedDataParallel; buckets in bfloat16 by unisono", ""]
    lines += [
        "| place | unisono s | gloo s | without exchange s | gloo / unisono |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for path in sorted(HERE.glob("ddp_*.json")):
        medians = json.loads(path.read_text())["median_s"]
        ours, gloo, alone = (medians[name] for name in ("unisono, bfloat16", "gloo", "without exchange"))
        lines.append(
            f"| {path.stem.removeprefix('ddp_')} | {ours:.2f} | {gloo:.2f} | {alone:.2f} | {gloo / ours:.2f} |"
        )
    lines += communication_tables()
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.", ""]
    return "\n".join(lines)


def communication_tables() -> list[str]:
    """Communication of a step in milliseconds: medians of the rounds, and quartiles in brackets."""
    path = HERE / "communication_one_node.json"
    if not path.exists():
        return []
    lines = ["", "## Communication of a step, unmodified DistributedDataParallel, one node", ""]
    for name, model in json.loads(path.read_text())["models"].items():
        lines += [f"{name}, {model['gradient_bytes'] / 1e6:.0f} MB of gradients", ""]
        lines += ["| | step ms | exposed ms | in all ms |", "| --- | ---: | ---: | ---: |"]
        alone = model["seconds"][ALONE]["step"]
        for contender, times in model["seconds"].items():
            exposed = [step - least for step, least in zip(times["step"], alone, strict=True)]
            lines.append(
                f"| {contender} | {' | '.join(map(milliseconds, (times['step'], exposed, times['in all'])))} |"
            )
        lines.append("")
    return lines


def milliseconds(seconds: list[float]) -> str:
    """The median, and the quartiles."""
    first, median, third = (1e3 * quartile for quartile in statistics.quantiles(seconds, n=4, method="inclusive"))
    return f"{median:.1f} ({first:.1f} to {third:.1f})"


def main(parts: list[str]) -> None:
    """Run the parts that are named, all by default, and write the summary of what there is."""
    known = {f"{kind.__name__}:{place}": (kind, place) for place in MOST for kind in (operations, step)}
    known["communication:one_node"] = communication, "one_node"
    for part in parts or known:
        if part not in known:
            sys.exit(f"no part {part!r}; there are {', '.join(known)}")
        kind, place = known[part]
        kind(place)
    (HERE / "summary.md").write_text(summary())
    print(summary())


if __name__ == "__main__":
    main(sys.argv[1:])
