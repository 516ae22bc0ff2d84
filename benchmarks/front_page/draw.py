"""Draws README's chart and the list of figures from what the other benchmarks have measured.

    python benchmarks/front_page/draw.py

Reads benchmarks/collectives, overlaps, tensor_parallel, rules, loading and foresight; writes docs/pictures/front.svg
and the list between the marks of docs/figures.md. Needs matplotlib.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono.foresight import ledger
from unisono.formats import format_bytes
from unisono.view.chart import render
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
CHART = ROOT / "docs" / "pictures" / "front.svg"
PAGE = ROOT / "docs" / "figures.md"
MARKS = "<!-- benchmarks/front_page/draw.py writes from here -->", "<!-- to here -->"

COLORS = {
    "Unisono": "#0b6e4f",
    "Intel MPI": "#8e6c8a",
    "MPICH": "#c1666b",
    "Open MPI": "#d4b483",
    "gloo": "#4281a4",
    "DDP on gloo": "#4281a4",
}
NETWORKS = ("ResNet-50", "VGG-A", "AlexNet")


def read(path: str) -> Any:
    """Return what a benchmark has written."""
    return json.loads((BENCHMARKS / path).read_text())


def allreduce(setting: str) -> dict[int, dict[str, float]]:
    """Return milliseconds by bytes and contender; "bound" is the link's, where there is one."""
    names = {"auto": "Unisono", "MPI library": "MPICH", "gloo": "gloo", "auto bfloat16": "bfloat16"}
    by_size: dict[int, dict[str, float]] = {}
    for row in read(f"collectives/{setting}/results.json")["sizes"]:
        times = {names[name]: entry["median_us"] / 1e3 for name, entry in row["contenders"].items() if name in names}
        by_size[row["bytes"]] = times | ({"bound": row["bound_us"] / 1e3} if row["bound_us"] else {})
    if (BENCHMARKS / f"collectives/{setting}/open_mpi.json").exists():
        for nbytes, took in open_mpi(setting).items():
            by_size[nbytes]["Open MPI"] = took
    return by_size


def one_node() -> dict[int, dict[str, float]]:
    """Return milliseconds of an allreduce of one node's ranks by bytes and contender."""
    names = {
        "ordinary": "Unisono",
        "windows": "shared",
        "intel": "Intel MPI",
        "openmpi": "Open MPI",
        "mpich": "MPICH",
        "gloo": "gloo",
        "copy": "copy",
    }
    rows = [row for row in read("collectives/against/results.json")["rows"] if row["collective"] == "allreduce"]
    return {
        row["bytes"]: {
            said: statistics.median(row["us"][name]["after a barrier"]) / 1e3 for name, said in names.items()
        }
        for row in rows
    }


def open_mpi(setting: str) -> dict[int, float]:
    """Return milliseconds by bytes."""
    medians = read(f"collectives/{setting}/open_mpi.json")["median_us"]
    return {int(nbytes): took / 1e3 for nbytes, took in medians.items()}


def steps(hosts: int) -> dict[tuple[str, float], dict[str, float]]:
    """Return seconds of a training step by network and communication / computing, with the link's bound."""
    seconds = {}
    for row in read(f"overlaps/lab_{hosts}.json")["rows"]:
        times = {"Unisono": row["step_s"]["auto"], "DDP on gloo": row["step_s"]["DDP on gloo"]}
        seconds[row["network"], row["ratio"]] = times | {"bound": row["float32"]["bound_of_link_s"]}
    return seconds


class Figure(NamedTuple):
    """Result beside that of peers and a bound, in words."""

    what: str
    ours: str
    peers: str
    bound: str


def listed() -> list[str]:
    """Return all figures as a list in Markdown, which a narrow screen shows whole."""
    return [
        f"- **{figure.what}**: {figure.ours}. Peers: {figure.peers}. Bound: {figure.bound}." for figure in figures()
    ]


def figures() -> Iterator[Figure]:
    """Yield all figures."""
    node = one_node()
    for nbytes, said in ((4096, "4 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")):
        times = node[nbytes]
        peers = ", ".join(f"{name} {_ms(times[name])}" for name in ("Intel MPI", "Open MPI", "MPICH", "gloo"))
        ours = f"{_ms(times['Unisono'])}; in shared memory {_ms(times['shared'])}"
        yield Figure(f"allreduce of {said}, one node, 2 ranks", ours, peers, f"copy {_ms(times['copy'])}")
    far = allreduce("supernodes")
    for nbytes, said in ((1 << 20, "1 MiB"), (64 << 20, "64 MiB")):
        times = far[nbytes]
        peers = ", ".join(f"{name} {_ms(times[name])}" for name in ("MPICH", "Open MPI", "gloo"))
        ours = f"{_ms(times['Unisono'])}; {_ms(times['bfloat16'])} in bfloat16"
        yield Figure(f"allreduce of {said}, 8 hosts, 2 switches", ours, peers, f"link, float32: {_ms(times['bound'])}")
    for network in NETWORKS:
        times = steps(4)[network, 1.0]
        what, peers = f"emulated step, layers of {network}, 4 hosts", f"DDP on gloo {times['DDP on gloo']:.2f} s"
        yield Figure(what, f"{times['Unisono']:.2f} s", peers, f"overlapped fully {times['bound']:.2f} s")
    yield from (split_layers("VGG-A"), split_layers("AlexNet"), slow_link(), slow_worker(), loading(), foresight())


def split_layers(network: str) -> Figure:
    """Return the figure of a step whose layers are split."""
    rows = [row for row in read("tensor_parallel/hybrid.json") if row["network"] == network]
    row = max(rows, key=lambda row: row["hosts"])
    step, hosts = row["step_s"], row["hosts"]
    ours, parallel = step[f"hybrid, groups of {hosts}"], step["data parallel"]
    peers = ", ".join(f"{name} {step[f'{name}, gloo']:.2f} s" for name in ("DTensor", "FSDP2"))
    return Figure(
        f"step of a narrow {network}, {hosts} hosts, {row['rate_bits'] / 1e6:.0f} Mbit/s",
        f"hybrid {ours:.2f} s; data parallel {parallel:.2f} s",
        f"on gloo: {peers}",
        f"computing {row['computing_s']:.2f} s",
    )


def slow_link() -> Figure:
    """Return the figure of the time to an accuracy over a slow link."""
    results = read("rules/to_accuracy.json")
    ours, bsp, steps = (
        statistics.median(row[name][key] for row in results["seeds"].values())
        for name, key in (("diloco", "seconds"), ("bsp", "seconds"), ("bsp", "steps"))
    )
    rate, bound = results["rate_bits"] / 1e6, steps * results["computing_s"]
    what = f"Fashion-MNIST to 85%, {results['hosts']} hosts, {rate:.0f} Mbit/s"
    return Figure(
        what, f"DiLoCo, 4 bits: {ours:.1f} s", f"BSP, float32: {bsp:.1f} s", f"BSP's computing: {bound:.1f} s"
    )


def slow_worker() -> Figure:
    """Return the figure of the steps of workers beside a slow one."""
    rates = read("rules/slow_worker.json")["steps_a_second"]
    ours, bsp = (statistics.median(rates[name]["slow"]) for name in ("EASGD", "BSP"))
    alone = statistics.median(rates["EASGD"]["equal"])
    what = "steps a second beside a worker half as fast"
    return Figure(what, f"EASGD {ours:.1f}", f"BSP {bsp:.1f}", f"none slow: {alone:.1f}")


def loading() -> Figure:
    """Return the figure of decoded images."""
    rates = read("loading/decoding.json")["images_per_second"]
    peers = f"DataLoader: Pillow {rates['DataLoader, Pillow']:,.0f}, OpenCV {rates['DataLoader, OpenCV']:,.0f}"
    bound = f"libjpeg-turbo {rates['libjpeg-turbo alone']:,.0f}"
    return Figure("JPEGs decoded and cropped a second, one core", f"{rates['ours']:,.0f}", peers, bound)


def foresight() -> Figure:
    """Return the figure of sealed predictions."""
    entries = ledger.read(BENCHMARKS / "foresight/sealed/ledger.jsonl")[0]
    drawn = {place_of(entry): entry for entry in entries if entry.labels["kind"] == "drawn"}
    median, high = np.percentile([entry.error for entry in drawn.values()], [50, 95])
    again = [entry for entry in entries if entry.labels["kind"] == "repeated"]
    apart = [abs(entry.measurement.step.median / drawn[place_of(entry)].measurement.step.median - 1) for entry in again]
    return Figure(
        f"error of a predicted step, {len(drawn)} sealed runs, 2 to 8 hosts",
        f"median {median:.1%}; of 95% at most {high:.1%}",
        "none known that publishes its own",
        f"the same run twice {statistics.median(apart):.1%}",
    )


def place_of(entry: ledger.LedgerEntry) -> tuple[str, str]:
    """Return the cluster and the place of a run."""
    return entry.labels["cluster"], entry.labels["place"]


def _ms(milliseconds: float) -> str:
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.0f} µs" if milliseconds >= 0.01 else f"{1e3 * milliseconds:.1f} µs"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def draw(figure: Figure) -> None:
    """Draw three panels: one node, the network, the training step."""
    node, network, step = figure.subplots(1, 3)
    by_size = one_node()
    for name in ("gloo", "MPICH", "Open MPI", "Intel MPI"):
        ratios = [times[name] / times["Unisono"] for times in by_size.values()]
        node.plot(list(by_size), ratios, "o-", color=COLORS[name], label=name, markersize=3)
    node.axhline(1, color=COLORS["Unisono"], label="Unisono")
    node.set(yscale="log", title="allreduce on one node, 2 ranks:\ntime over Unisono's")
    node.yaxis.set_major_formatter("{x:g}")
    by_size = {nbytes: times for nbytes, times in allreduce("supernodes").items() if nbytes >= 1 << 18}
    for name in ("Unisono", "MPICH", "Open MPI", "gloo"):
        reached = [times["bound"] / times[name] for times in by_size.values()]
        network.plot(list(by_size), reached, "o-", color=COLORS[name], label=name, markersize=3)
    network.set(ylim=(0, 1.05), title="allreduce on 8 hosts of 2 switches:\nshare of the link's limit")
    network.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes, base in ((node, 64), (network, 4)):
        axes.set_xscale("log", base=base)
        axes.xaxis.set_major_formatter(lambda nbytes, _: format_bytes(nbytes))
        axes.minorticks_off()
    for place, name in enumerate(("Unisono", "DDP on gloo")):
        heights = [steps(4)[model, 1.0][name] / steps(4)[model, 1.0]["bound"] for model in NETWORKS]
        places = [index + 0.4 * place - 0.2 for index in range(len(NETWORKS))]
        step.bar(places, heights, 0.38, color=COLORS[name], label=name)
    step.axhline(1, color=INK, linestyle=":", label="limit")
    step.set(ylim=(0, 1.9), title="training step on 4 hosts:\ntime over the limit")
    step.set_xticks(range(len(NETWORKS)), NETWORKS)
    for axes in (node, network, step):
        axes.set_title(axes.get_title("left"), fontsize=8)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7, ncols=2 if axes is node else 1)


def main() -> None:
    """Write both."""
    CHART.write_bytes(render(draw, 11, 3.4))
    begin, end = MARKS
    text = "\n".join([begin, "", *listed(), "", end])
    PAGE.write_text(
        re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: text, PAGE.read_text(), flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
