"""Times all collectives of Unisono, MPI libraries and gloo on 8 or 2 hosts of the lab, without a table, by turns.

    python benchmarks/collectives/lab_libraries.py [--rounds 3] [--setting switch] [--collectives reduce] [--sizes 4 64]
        [--peers mpich]

Root, iproute2; about 10 minutes a round. A turn is one contender's program on the whole lab. Written:
lab_libraries.json, lab_libraries.md, in which rows of other settings, collectives and sizes stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from unisono.bench.against import PEERS, command_of, install, merge, plan_turns
from unisono.bench.peer_program import BACK_TO_BACK, COLLECTIVES, COPY, OURS
from unisono.errors import UsageError
from unisono.network.links import Network
from unisono.network.price import bound
from unisono.placement import Placement

HERE = Path(__file__).parent
SETTINGS = {"switch": (1, 8, 200), "supernodes": (2, 4, 200), "pair": (1, 2, 200), "fast_pair": (1, 2, 10_000)}
"""Supernodes, hosts of each, and megabits per second of a host's link, each way. On 2 cores, each rank of a pair has
one."""

OVERSUBSCRIBED = 4
SIZES = (4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ENVIRONMENT = {
    "UNISONO_TABLE": "",
    "I_MPI_FABRICS": "ofi",
    "FI_PROVIDER": "tcp",
    "I_MPI_WAIT_MODE": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""No table of measured choices; Intel MPI by sockets, as the hosts share the memory of one machine; and no spinning by
Intel MPI and Open MPI on its two cores, where a call of 4 bytes took them 30 ms instead of 0.3."""

TURN_SECONDS = 900.0


def turn(name: str, setting: str, settings: Mapping[str, Sequence[Any]], output: Path) -> dict[str, Any]:
    """Run a contender on the lab. Return what it has written. Raises UsageError where it fails or hangs."""
    (mpiexec, _, _, *program), environment = command_of(name, 1, {**os.environ, **ENVIRONMENT})
    supernodes, hosts, rate = SETTINGS[setting]
    options = [f"--supernodes={supernodes}", f"--hosts={hosts}", f"--rate={rate}mbit"]
    options += [f"--oversubscribe={OVERSUBSCRIBED}", f"--mpiexec={mpiexec}"]
    command = [sys.executable, "-m", "unisono", "lab", *options, "--", *program, str(output), json.dumps(settings)]
    try:
        done = subprocess.run(command, env=environment, timeout=TURN_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"not done after {TURN_SECONDS:g} s") from error
    if done.returncode:
        raise UsageError(f"exit code {done.returncode}")
    results: dict[str, Any] = json.loads(output.read_text())
    return results


def measure(setting: str, rounds: int, settings: Mapping[str, Sequence[Any]], peers: Sequence[str]) -> dict[str, Any]:
    """Return all rows of a setting; a peer that fails is named and left out of all rounds."""
    runs: dict[str, list[Any]] = {name: [] for name in (OURS, *peers)}
    failed: dict[str, str] = {}
    for index, name in plan_turns(peers, rounds):
        if name in failed:
            continue
        print(f"{setting}, round {index} of {rounds}: {name}", flush=True)
        with TemporaryDirectory() as folder:
            try:
                runs[name].append(turn(name, setting, settings, Path(folder) / "results.json"))
            except UsageError as error:
                failed[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
    kept = {name: of for name, of in runs.items() if name not in failed}
    return {"setting": setting, "rounds": rounds, "failed": failed, **merge(kept)}


def least(setting: str, collective: str, nbytes: int) -> float:
    """Return the microseconds that the links need for the payload; headers are not counted."""
    supernodes, hosts, rate = SETTINGS[setting]
    each = tuple((rank,) for rank in range(supernodes * hosts))
    of = tuple(node // hosts for node in range(supernodes * hosts)) if supernodes > 1 else ()
    beta = 8 / (rate * 1e6)
    network = Network(0, beta, uplink_beta=beta * OVERSUBSCRIBED / hosts if of else None)
    return bound(collective, Placement(each, of), network, nbytes) * 1e6 if nbytes else 0.0


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table: medians in milliseconds back to back, ours beside the best peer and the bound."""
    names = list(dict.fromkeys(name for row in results["rows"] for name in row["us"] if name != COPY))
    head = ["collective", "bytes", *names, "bound", "ours / best peer", "windows / best peer", "ours / bound"]
    lines = [f"### {results['setting']}", "", f"| {' | '.join(head)} |"]
    lines += ["| --- |" + " ---: |" * (len(head) - 1)]
    for row in results["rows"]:
        ms = {name: median(us[BACK_TO_BACK]) / 1e3 for name, us in row["us"].items() if name != COPY}
        links = least(results["setting"], row["collective"], row["bytes"]) / 1e3
        ours, windows, *peers = ms.values()
        cells = [row["collective"], str(row["bytes"]), *(f"{ms[name]:.3f}" if name in ms else "" for name in names)]
        cells.append(f"{links:.3f}")
        cells += [f"{ours / min(peers):.2f}", f"{windows / min(peers):.2f}", f"{ours / links:.2f}" if links else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the settings; write their rows and the tables."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    asked = parser.parse_args()
    for peer in asked.peers:
        install(peer, print)
    path = HERE / "lab_libraries.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for setting in asked.setting:
        new = measure(setting, asked.rounds, {"collectives": asked.collectives, "sizes": asked.sizes}, asked.peers)
        measured = {(row["collective"], row["bytes"]) for row in new["rows"]}
        kept = [
            row for row in known.get(setting, {"rows": []})["rows"] if (row["collective"], row["bytes"]) not in measured
        ]
        order = {name: index for index, name in enumerate(COLLECTIVES)}
        rows = sorted([*kept, *new["rows"]], key=lambda row: (order[row["collective"]], row["bytes"]))
        known[setting] = {**new, "rows": rows}
        path.write_text(json.dumps(known) + "\n")
    text = "\n\n".join(table(known[setting]) for setting in SETTINGS if setting in known)
    (HERE / "lab_libraries.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
