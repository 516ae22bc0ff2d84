"""Figures of the three systems on GPUs: DIMD, Theano-MPI, MXNET-MPI."""

from __future__ import annotations

from functools import partial

from benchmarks.seeds.figure import SeedFigure
from benchmarks.seeds.networks import flops_of, layers_of, parameters_of
from benchmarks.seeds.supernodes import weak_speedup

from unisono.network import price
from unisono.placement import regular
from unisono.plan.machines import find_machine
from unisono.plan.run_row import epoch_seconds
from unisono.schedules import find

dimd, theano, mxnet = (partial(SeedFigure, name) for name in ("DIMD", "Theano-MPI", "MXNET-MPI"))

IMAGENET = 1_200_000
"""Images of ImageNet-1k: DIMD 5.2."""

DIMD_IMAGES_PER_SECOND = IMAGENET * 90 / (48 * 60)
"""Images per second of DIMD's 256 P100: 90 epochs in 48 minutes."""

SHARE = (
    "P100 at the share of its peak that DIMD's own 48 minutes are: no paper gives the rate of one GPU; no sum inside "
    "the node"
)
PEAK = "P100 at its peak, 10.6 TFLOP/s (the vendor's): a lower bound of the time"
OWN_GOOGLENET = "FLOPs of our googlenet_bn; the paper's GoogLeNetBN, 93 MB, is another network"
BATCH = "32 images a GPU: the paper gives no batch"

IMAGES = 5120
"""Images between two measurements of Theano-MPI's table 3."""

TABLE_3 = {
    "AlexNet-128b": ("alexnet", 128, 3.90, 31.2, (2.01, 0.75, 0.47), (5.3, 6.7, 7.1)),
    "AlexNet-32b": ("alexnet", 32, 4.56, 36.40, (8.03, 2.94, 1.83), (2.9, 4.9, 5.7)),
    "GoogLeNet-32b": ("googlenet", 32, 16.82, 134.9, (2.07, 1.96, 1.76), (7.1, 7.2, 7.3)),
}
"""Network, batch, seconds of computing on 8 GPUs and on 1, seconds of communication and speedup by AR, ASA, ASA16."""

VGGNET = ((41.41, 4.3), (8.60, 6.7), (4.84, 7.2))
"""Seconds of communication and speedup of VGGNet-32b, inside one node."""

STRATEGIES = ("AR", "ASA", "ASA16")

BYTES = (
    "gradients cross PCIe and the host's memory on both sides, without GPUDirect (its 5), and are summed on the GPU: "
    "the paper gives no rate of either"
)
NOT_BYTES = (
    "a time of the bytes, as of PCIe and the host's memory, cannot explain it: with 4.6 times GoogLeNet's bytes, an "
    "exchange of AlexNet by ASA takes 1.5 times as long. Each exchange, or each of GoogLeNet's 128 arrays (AlexNet has "
    "16), has a cost of its own, which the paper does not give"
)
NO_NODE = "8 GPUs in one node: the paper gives no bandwidth of PCIe and QPI"
QDR = "QDR: 4 GB/s and 1.3 us, as in machines/mosaic_k20m.toml"


def figures() -> list[SeedFigure]:
    """Return all figures of the three systems."""
    return [*_dimd(), *_theano(), *_mxnet()]


def training_flops(name: str) -> float:
    """Return the FLOPs of a step for one sample."""
    return sum(flops_of(layer) for layer in layers_of(name))


def p100_flops() -> float:
    """Return the FLOPs per second of a P100 in DIMD's 48 minutes of ResNet-50."""
    return DIMD_IMAGES_PER_SECOND / 256 * training_flops("resnet50")


def exchange_seconds(schedule: str, machine_name: str, nodes: int, nbytes: float) -> float:
    """Return the priced seconds of an allreduce between nodes."""
    placement = regular(1, nodes, 1)
    return float(price(find(schedule, placement).allreduce, placement, find_machine(machine_name).network(), nbytes))


def _dimd() -> list[SeedFigure]:
    machine = find_machine("minsky_p100")
    peak = machine.node.flops / machine.node.accelerators
    computing = 64 * training_flops("googlenet_bn") / p100_flops()
    step_8, step_32 = (computing + exchange_seconds("multicolor", "minsky_p100", nodes, 93e6) for nodes in (8, 32))
    speedup = weak_speedup(32, computing, step_32 - computing)
    base = f"against one node without exchange; against 8 nodes the equations give {step_8 / step_32:.1%}"
    exchange = exchange_seconds("multicolor", "minsky_p100", 64, 4 * parameters_of("resnet50"))
    step = 32 * training_flops("resnet50") / peak + exchange
    minutes = 90 * epoch_seconds(IMAGENET, 256 * 32, step) / 60
    return [
        dimd(
            "figure 6", "efficiency (%), GoogLeNetBN, 32 nodes", 90.5, 100 * speedup / 32, (SHARE, OWN_GOOGLENET, base)
        ),
        dimd(
            "5.5",
            "minutes of 90 epochs, ResNet-50, 256 P100",
            48,
            minutes,
            (PEAK,),
            "the missing input is the rate of a P100 for ResNet-50; 48 minutes are "
            f"{p100_flops() / peak:.0%} of its peak, exchange included",
        ),
    ]


def _theano() -> list[SeedFigure]:
    found = []
    for words, (name, batch, computing, alone, communication, speedups) in TABLE_3.items():
        exchanges = IMAGES // (8 * batch)
        nbytes = 4 * parameters_of(name)
        for strategy, seconds, speedup in zip(STRATEGIES, communication, speedups, strict=True):
            schedule = "ring" if strategy == "AR" else "direct"
            width = 0.5 if strategy == "ASA16" else 1
            ours = exchanges * exchange_seconds(schedule, "mosaic_k20m", 8, width * nbytes)
            assumed = (
                QDR,
                *(("AR: a ring; the paper does not say what the library does",) if strategy == "AR" else ()),
            )
            reason = NOT_BYTES if name == "googlenet" and strategy != "AR" else BYTES
            found += [
                theano("table 3", f"exchange of 5,120 images (s), {words}, {strategy}", seconds, ours, assumed, reason),
                theano(
                    "table 3",
                    f"speedup on 8, {words}, {strategy}",
                    speedup,
                    alone / (computing + ours),
                    assumed,
                    reason,
                ),
            ]
    for strategy, (seconds, speedup) in zip(STRATEGIES, VGGNET, strict=True):
        found += [
            theano("table 3", f"exchange of 5,120 images (s), VGGNet-32b, {strategy}", seconds, None, (), NO_NODE),
            theano("table 3", f"speedup on 8, VGGNet-32b, {strategy}", speedup, None, (), NO_NODE),
        ]
    return found


def _mxnet() -> list[SeedFigure]:
    computing = 32 * training_flops("inception_bn") / p100_flops()
    exchange = exchange_seconds("ring", "minsky_p100", 32, 4 * parameters_of("inception_bn"))
    funnel, chain = computing + exchange, max(computing, exchange)
    return [
        mxnet(
            "figure 14",
            "funnel over dependency chaining, Inception-BN, 128 P100",
            1.6,
            funnel / chain,
            (SHARE, BATCH),
            "all of the exchange exposed, or all hidden: 1.6 needs an exchange of 60% of the computing, and the link's "
            "time is far less. The missing inputs are the batch, the rate of a P100 and the time of sums in the node",
        )
    ]
