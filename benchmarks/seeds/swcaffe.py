"""swCaffe's figures 10 and 11: scaling to 1,024 nodes of TaihuLight."""

from __future__ import annotations

from functools import partial

from benchmarks.seeds.figure import SeedFigure
from benchmarks.seeds.supernodes import round_robin_seconds, weak_speedup

from unisono.plan.exchange_cost import network_of
from unisono.plan.machines import find_machine

figure = partial(SeedFigure, "swCaffe")

NODES = 1024

RATES = {"AlexNet": 94.17, "ResNet-50": 5.56}
"""Images per second of a node: table 3."""

GRADIENT_BYTES = {"AlexNet": 232.6e6, "ResNet-50": 97.7e6}
"""Bytes of the gradients: 6.3."""

RUNS = (
    ("AlexNet", 256, 715.45, 0.3013),
    ("AlexNet", 128, 561.58, 0.4515),
    ("AlexNet", 64, 409.50, 0.6001),
    ("ResNet-50", 32, 928.15, 0.1065),
    ("ResNet-50", 64, 828.32, 0.1911),
)
"""Network, samples of a node, speedup of figure 10, share of communication of figure 11: as 6.3 pairs them."""

RATE = "table 3's images/s for all numbers of samples: it has AlexNet with 256 and ResNet-50 with 32"
LATENCY = "1 us a message: the paper gives the magnitude; sums at the 112 GB/s of a node's memory (3.1)"
OWN_SHARE = "N (1 - share), with the share that the paper measured: its two figures agree; nothing is predicted"
EQUATIONS = (
    "equations 5 and 6 at 12 GB/s give {ms:.0f} ms for {mb:.0f} MB, {share:.1%} of the step; figure 11's "
    "{measured:.1%} are {seconds:.2f} s, {rate:.0f} MB/s. The equations lack what slows this exchange in use"
)
GROWS = "; nor does an equation explain that ResNet-50's exchange takes longer with more samples, for the same bytes"


def exchange_seconds(network: str) -> float:
    """Return the seconds of the topology-aware allreduce of a network's gradients."""
    machine = find_machine("taihulight")
    return float(
        round_robin_seconds(NODES, machine.topology.supernode, GRADIENT_BYTES[network], network_of(machine, 1))
    )


def figures() -> list[SeedFigure]:
    """Return each speedup from the equations, and from the share of communication that the paper measured."""
    found = []
    for network, samples, speedup, measured in RUNS:
        computing, exchange = samples / RATES[network], exchange_seconds(network)
        share = exchange / (computing + exchange)
        theirs, nbytes = computing * measured / (1 - measured), GRADIENT_BYTES[network] / 1e6
        reason = EQUATIONS.format(
            ms=exchange * 1e3, mb=nbytes, share=share, measured=measured, seconds=theirs, rate=nbytes / theirs
        )
        reason += GROWS if network == "ResNet-50" else ""
        words = f"speedup, {network}, {samples} samples a node, 1,024 nodes"
        found += [
            figure(
                "figure 10",
                f"{words}: by 5.1",
                speedup,
                weak_speedup(NODES, computing, exchange),
                (LATENCY, RATE),
                reason,
            ),
            figure(
                "figure 10",
                f"{words}: by figure 11's share",
                speedup,
                weak_speedup(NODES, 1 - measured, measured),
                (OWN_SHARE,),
                predicted=False,
            ),
        ]
    return found
