"""Draws a part of a timeline that `unisono train --timeline FILE` has written: what Perfetto shows, as a picture.

python benchmarks/overlaps/picture.py FILE OUT.png FIRST_MS LAST_MS
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "allreduce": "#fd8d3c",
    "update": "#74c476",
    "pack": "#dadaeb",
    "set_grads": "#bcbddc",
    "wait": "#f7f7f7",
}

Event = dict[str, Any]


def main(source: str, target: str, first: str, last: str) -> None:
    """Draw what lies between two times, in milliseconds since the run began."""
    events: list[Event] = json.loads(Path(source).read_text())["traceEvents"]
    begin, end = float(first) * 1e3, float(last) * 1e3
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = [one for one in events if one["ph"] == "X" and one["ts"] < end and one["ts"] + one["dur"] > begin]
    spans.sort(key=lambda one: -one["dur"])  # what lies within another is drawn over it
    lanes = sorted({(one["pid"], one["tid"]) for one in spans})
    places = {lane: len(lanes) - 1 - number for number, lane in enumerate(lanes)}
    figure, axes = plt.subplots(figsize=(13, 0.75 + 0.5 * len(lanes)))
    for one in spans:
        what = one["name"].partition(" ")[0]
        left, right = max(one["ts"], begin), min(one["ts"] + one["dur"], end)
        place = places[one["pid"], one["tid"]]
        axes.barh(place, (right - left) / 1e3, left=left / 1e3, height=0.8, color=COLOURS.get(what, "#cccccc"))
        if right - left > (end - begin) / 22:
            axes.text((left + right) / 2e3, place, one["name"], ha="center", va="center", fontsize=7)
    chains: defaultdict[str, list[Event]] = defaultdict(list)
    for one in events:
        if one["ph"] in "stf":
            chains[one["id"]].append(one)
    for chain in chains.values():
        for one, other in pairwise(chain):
            shown = {(at["pid"], at["tid"]) for at in (one, other)} <= set(lanes)
            if begin <= one["ts"] and other["ts"] <= end and shown:
                start = (one["ts"] / 1e3, places[one["pid"], one["tid"]])
                stop = (other["ts"] / 1e3, places[other["pid"], other["tid"]])
                axes.annotate("", stop, start, arrowprops={"arrowstyle": "->", "lw": 0.6, "color": "#444444"})
    axes.set_yticks([places[lane] for lane in lanes], [f"rank {lane[0]}  {names[lane]}" for lane in lanes], fontsize=8)
    axes.set_xlim(begin / 1e3, end / 1e3)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
