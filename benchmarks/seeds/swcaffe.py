"""swCaffe's figures 7, 10 and 11: rounds of its allreduce, and scaling to 1,024 nodes of TaihuLight."""

from __future__ import annotations

from functools import partial

from benchmarks.seeds.supernodes import rank_order_seconds, round_robin_seconds, weak_speedup
from benchmarks.seeds.theirs import Predictions, theirs

from unisono.network import Network
from unisono.papers.figures import PaperPrediction
from unisono.plan.machines import find_machine

SPEEDUPS, SHARES = "swcaffe-figure-10", "swcaffe-figure-11"

NODES = 1024

RATES = {"AlexNet": 94.17, "ResNet-50": 5.56}
"""Images per second of a node: table 3."""

GRADIENT_BYTES = {"AlexNet": 232.6 * 2**20, "ResNet-50": 97.7 * 2**20}
"""Bytes of the gradients: 6.3, whose MB are MiB: 60,965,224 parameters of AlexNet are 232.6 MiB."""

RUNS = (("AlexNet", 256), ("AlexNet", 128), ("AlexNet", 64), ("ResNet-50", 32), ("ResNet-50", 64))
"""Network, and samples of a node."""

USED = RUNS[0]
"""Run whose share of communication, in figure 11, is taken as the rate of an exchange in use."""

RATE = "table 3's images/s for all numbers of samples: it has AlexNet with 256 and ResNet-50 with 32"
LATENCY = "1 us a message: the paper gives the magnitude; sums at the 112 GB/s of a node's memory (3.1)"
EQUATIONS = (
    "{network} with {samples}: equations 5 and 6 at 12 GB/s give {ms:.0f} ms, figure 11's {measured:.1%} of the step "
    "are {seconds:.2f} s, {rate:.0f} MB/s"
)
LACKS = (
    "the equations lack what slows this exchange in use; nor do they explain that ResNet-50's takes longer with more "
    "samples, for the same bytes"
)


def predictions() -> Predictions:
    """Return speedups, and the shares that they follow from, by the equations and with the rate of one exchange."""
    speedups, shares = {}, {}
    in_use = GRADIENT_BYTES[USED[0]] / communication_seconds(*USED)
    used = (
        f"figure 11's share of AlexNet with 256 samples a node, {communication_seconds(*USED):.2f} s: an exchange in "
        f"use at {in_use / 1e6:.0f} MB/s"
    )
    for run in RUNS:
        (network, samples), nbytes = run, GRADIENT_BYTES[run[0]]
        computing, exchange, slow = samples / RATES[network], exchange_seconds(network), nbytes / in_use
        share, measured = exchange / (computing + exchange), share_of(*run)
        reason = EQUATIONS.format(
            **{"network": network, "samples": samples, "ms": exchange * 1e3, "measured": measured},
            seconds=communication_seconds(*run),
            rate=nbytes / 1e6 / communication_seconds(*run),
        )
        reason += f"; {LACKS}" if run == RUNS[-1] else ""
        predicted = partial(PaperPrediction, spent=run == USED, assumptions=(LATENCY, RATE), used=used, reason=reason)
        fitted = None if run == USED else slow
        speedups[f"speedup, {words_of(*run)}"] = predicted(
            weak_speedup(NODES, computing, exchange),
            None if fitted is None else weak_speedup(NODES, computing, fitted),
        )
        shares[f"share of communication, {words_of(*run)}"] = predicted(
            100 * share,
            None if fitted is None else 100 * fitted / (computing + fitted),
            reason="the speedups of figure 10 follow from these shares; its reasons are theirs",
            predicted=False,
        )
    return {SPEEDUPS: speedups, SHARES: shares, "swcaffe-figure-7": _rounds()}


def words_of(network: str, samples: int) -> str:
    """Return the run in the words of the rows."""
    return f"{network}, {samples} samples a node, 1,024 nodes"


def share_of(network: str, samples: int) -> float:
    """Return the share of communication that the paper measured, 0 to 1."""
    return theirs(SHARES, f"share of communication, {words_of(network, samples)}") / 100


def communication_seconds(network: str, samples: int) -> float:
    """Return the seconds of communication in a step that the paper's share means."""
    share = share_of(network, samples)
    return samples / RATES[network] * share / (1 - share)


def exchange_seconds(network: str) -> float:
    """Return the seconds of the topology-aware allreduce of a network's gradients."""
    machine = find_machine("taihulight")
    return float(round_robin_seconds(NODES, machine.topology.supernode, GRADIENT_BYTES[network], machine.network(1)))


def _rounds() -> dict[str, PaperPrediction]:
    """Return the bytes that a node sends to the other supernode in half an allreduce, over the payload."""
    ways = {"in rank order": rank_order_seconds, "round robin": round_robin_seconds}
    slow, fast = (Network(alpha=0.0, beta=1.0, uplink_beta=across / 4) for across in (2.0, 1.0))
    return {
        f"bytes of a node across, {order}, reduce-scatter": PaperPrediction(
            float(seconds(8, 4, 1.0, slow) - seconds(8, 4, 1.0, fast)) / 2, predicted=False
        )
        for order, seconds in ways.items()
    }
