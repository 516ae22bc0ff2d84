"""Figures of the three systems on GPUs: DIMD, Theano-MPI, MXNET-MPI."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from benchmarks.seeds.networks import flops_of, layers_of, parameters_of, shape_of
from benchmarks.seeds.supernodes import weak_speedup
from benchmarks.seeds.theirs import Predictions, theirs

from unisono.models import MODELS
from unisono.network import price
from unisono.papers.figures import PaperPrediction
from unisono.placement import regular
from unisono.plan.machines import find_machine
from unisono.plan.run_plan import epoch_seconds
from unisono.schedules import find

IMAGENET = 1_200_000
"""Images of ImageNet-1k: DIMD 5.2."""

P100_RESNET50 = 219
"""Images per second of ResNet-50's training on a P100, batch 64, float32: TensorFlow's published benchmarks of 2017."""

PUBLISHED = (
    f"a P100 at {P100_RESNET50} images/s of ResNet-50 (TensorFlow's published benchmarks of 2017, synthetic images), "
    "and as many FLOP/s in other networks: no paper gives the rate of one GPU; no sum inside the node"
)
OWN_GOOGLENET = (
    "FLOPs of googlenet_bn_torch, 76.6 MB, the network of IBM's fork of Torch's examples; the paper's payload, 93 MB, "
    "is sent"
)
BATCH = "32 images a GPU: the paper gives no batch"

IMAGES = 5120
"""Images between two measurements of Theano-MPI's table 3."""

TABLE = "theano-mpi-table-3"

CLUSTER = {
    "AlexNet-128b": ("alexnet", 128, 3.90, 31.2),
    "AlexNet-32b": ("alexnet", 32, 4.56, 36.40),
    "GoogLeNet-32b": ("googlenet", 32, 16.82, 134.9),
}
"""Network, batch, seconds of computing on 8 GPUs and on 1, of table 3: on 8 nodes with a GPU each."""

NODE = ("vgg16", 32, 51.79, 405.2)
"""The same of VGGNet-32b: on 8 GPUs of one node."""

ARRAYS = {"alexnet": 16, "googlenet": 128}
"""Arrays of parameters, each of which is exchanged alone."""

PCIE = {"mosaic_k20m": 8e9, "copper_k80": 15.75e9}
"""Bytes per second of 16 lanes of PCIe, each way: of a K20m, second generation; of a board of 2 K80 GPUs, third."""

LANES = "PCIe: 8 GB/s of a K20m, 15.75 GB/s of the two GPUs of a K80, the vendor's 16 lanes; no sum takes time"
HOST = "AR copies gradients to the host and back (its 3.2)"
CROSSING = "ASA sends 6 of 8 pieces of a GPU's gradients, twice, out of its board"
BYTES = "without GPUDirect (its 5) bytes pass the host's memory, whose rate the paper does not give; AR sums there too"
NOT_BYTES = (
    "a time of the bytes, as of PCIe and the host's memory, cannot explain it: with 4.6 times GoogLeNet's bytes, an "
    "exchange of AlexNet by ASA takes 1.5 times as long. Each exchange, or each of GoogLeNet's 128 arrays (AlexNet has "
    "16), has a cost of its own, which the paper does not give"
)
NO_NODE = "half of all pieces cross QPI, through the host's memory (its 6), at a rate that the paper does not give"
QDR = "QDR: 4 GB/s and 1.3 us, as in machines/mosaic_k20m.toml"
RING = "AR: a ring; the paper does not say what the library does"


def predictions() -> Predictions:
    """Return the predictions of the three systems."""
    return {**_dimd(), "theano-mpi-table-2": _networks(), TABLE: {**_cluster(), **_node()}, **_mxnet()}


def training_flops(name: str) -> float:
    """Return the FLOPs of a step for one sample."""
    return sum(flops_of(layer) for layer in layers_of(name))


def p100_flops() -> float:
    """Return the FLOPs per second of a P100 that its published rate means."""
    return P100_RESNET50 * training_flops("resnet50")


def exchange_seconds(schedule: str, machine_name: str, nodes: int, nbytes: float) -> float:
    """Return the priced seconds of an allreduce between nodes."""
    placement = regular(1, nodes, 1)
    return float(price(find(schedule, placement).allreduce, placement, find_machine(machine_name).network(), nbytes))


def _dimd() -> Predictions:
    computing = 64 * training_flops("googlenet_bn_torch") / p100_flops()
    step_8, step_32 = (computing + exchange_seconds("multicolor", "minsky_p100", nodes, 93e6) for nodes in (8, 32))
    speedup = weak_speedup(32, computing, step_32 - computing)
    base = f"against one node without exchange; against 8 nodes the equations give {step_8 / step_32:.1%}"
    exchange = exchange_seconds("multicolor", "minsky_p100", 64, 4 * parameters_of("resnet50"))
    minutes = 90 * epoch_seconds(IMAGENET, 256 * 32, 32 / P100_RESNET50 + exchange) / 60
    efficiency = PaperPrediction(100 * speedup / 32, assumptions=(PUBLISHED, OWN_GOOGLENET, base))
    full = PaperPrediction(
        minutes,
        assumptions=(PUBLISHED,),
        reason=f"48 minutes are {90 * IMAGENET / 48 / 60 / 256:.0f} images/s a GPU with all that a run has beside its "
        "products: decoding of JPEGs, sums in the node, tests after epochs. About a third of the step, of which the "
        "paper gives no part",
    )
    return {
        "dimd-figure-6": {"efficiency, GoogLeNetBN, 32 nodes, multicolor": efficiency},
        "dimd-table-2": {"90 epochs, ResNet-50, 256 P100": full},
    }


def _networks() -> dict[str, PaperPrediction]:
    table = {}
    for label, name in (("AlexNet", "alexnet"), ("GoogLeNet", "googlenet"), ("VGGNet", "vgg16")):
        deep = "19 is VGG-19's depth; the parameters of its VGGNet are those of VGG-16" if name == "vgg16" else ""
        table[f"depth, {label}"] = PaperPrediction(depth_of(name), reason=deep, predicted=False)
        table[f"parameters, {label}"] = PaperPrediction(parameters_of(name), predicted=False)
    return table


@cache
def depth_of(name: str) -> int:
    """Return the products on the longest way from the inputs of a network to its outputs: layers with parameters."""
    with torch.device("meta"):
        outputs = MODELS.load(name)(1000, 3).train()(torch.empty(2, *shape_of(name)))
    first = outputs[0] if isinstance(outputs, tuple) else outputs

    @cache
    def deep(node: torch.autograd.graph.Node) -> int:
        product = node.name().startswith(("ConvolutionBackward", "AddmmBackward"))
        return product + max((deep(before) for before, _ in node.next_functions if before is not None), default=0)

    return deep(first.grad_fn)


def _cluster() -> dict[str, PaperPrediction]:
    """Return the times and speedups on 8 nodes.

    Measurements of theirs: AR's time of AlexNet-128b, a rate. Of ASA two, AlexNet-128b and GoogLeNet-32b: a rate, and a
    cost of each array, which are equal on the way of 16 bits.
    """
    table = {}
    library = _seconds("AlexNet-128b", "AR") / _exchanged("AlexNet-128b")
    large, small = (_seconds(label, "ASA") for label in ("AlexNet-128b", "GoogLeNet-32b"))
    per_byte, per_array = _solve(large, small)
    spent = (("AlexNet-128b", "AR"), ("AlexNet-128b", "ASA"), ("GoogLeNet-32b", "ASA"))
    array_rate = (
        f"ASA's times of AlexNet-128b and GoogLeNet-32b: {1 / per_byte / 1e9:.1f} GB/s, and {1e3 * per_array:.2f} ms "
        f"for each of {ARRAYS['alexnet']} and {ARRAYS['googlenet']} arrays"
    )
    for label, (name, batch, computing, alone) in CLUSTER.items():
        exchanges, nbytes = IMAGES // (8 * batch), 4 * parameters_of(name)
        ours = {
            "AR": exchange_seconds("ring", "mosaic_k20m", 8, nbytes) + 2 * nbytes / PCIE["mosaic_k20m"],
            "ASA": exchange_seconds("direct", "mosaic_k20m", 8, nbytes),
            "ASA16": exchange_seconds("direct", "mosaic_k20m", 8, nbytes / 2),
        }
        reason = f"{NOT_BYTES if name == 'googlenet' else BYTES}: {took(label, exchanges, ours)}"
        for strategy, seconds in ours.items():
            if strategy == "AR":
                fitted, used = library * _bytes(name), f"AR's time of AlexNet-128b: {1 / library / 1e9:.2f} GB/s"
                assumed = QDR, LANES, HOST, RING
            else:
                width = 0.5 if strategy == "ASA16" else 1
                fitted, used = per_byte * width * _bytes(name) + per_array * ARRAYS[name], array_rate
                assumed = (QDR,)
            is_spent, times = (label, strategy) in spent, (exchanges * seconds, exchanges * fitted)
            table |= _rows(label, strategy, computing, alone, *times, is_spent, assumed, used, reason)
    return table


def _node() -> dict[str, PaperPrediction]:
    """Return the times and speedups in one node, whose boards have two GPUs each; of theirs, ASA's time is a rate."""
    name, batch, computing, alone = NODE
    exchanges = IMAGES // (8 * batch)
    of_lanes = 2 * 4 * parameters_of(name) / PCIE["copper_k80"]
    ours = {"AR": 2 * of_lanes, "ASA": 2 * 6 / 8 * of_lanes, "ASA16": 6 / 8 * of_lanes}
    known = _seconds("VGGNet-32b", "ASA")
    used = f"ASA's time of VGGNet-32b: {exchanges * _bytes(name) / known / 1e9:.1f} GB/s in the node"
    table = {}
    reason = f"{NO_NODE}: {took('VGGNet-32b', exchanges, ours)}"
    for strategy, seconds in ours.items():
        spent, fitted = strategy == "ASA", known / 2 if strategy == "ASA16" else None
        assumed = (LANES, HOST if strategy == "AR" else CROSSING)
        times = exchanges * seconds, fitted
        table |= _rows("VGGNet-32b", strategy, computing, alone, *times, spent, assumed, used, reason)
    return table


def took(label: str, exchanges: int, ours: Mapping[str, float]) -> str:
    """Return the milliseconds of an exchange in words, theirs and ours in seconds, by AR, ASA and ASA16."""
    theirs_ms = (1e3 * _seconds(label, strategy) / exchanges for strategy in ours)
    ours_ms = (1e3 * seconds for seconds in ours.values())
    took_ms, lanes_ms = (" / ".join(f"{value:,.0f}" for value in some) for some in (theirs_ms, ours_ms))
    return f"an exchange of {label} by {' / '.join(ours)} took {took_ms} ms, of which links and lanes are {lanes_ms}"


def _rows(
    label: str,
    strategy: str,
    computing: float,
    alone: float,
    ours: float,
    fitted: float | None,
    spent: bool,
    assumed: tuple[str, ...],
    used: str,
    reason: str,
) -> dict[str, PaperPrediction]:
    """Return the two rows of a cell: the time, and the speedup that follows from it and from computing."""

    def speedup(seconds: float | None) -> float | None:
        return None if seconds is None else alone / (computing + seconds)

    fitted = None if spent else fitted
    used = "" if fitted is None else used
    return {
        f"exchange of 5,120 images, {label}, {strategy}": PaperPrediction(ours, fitted, spent, assumed, used, reason),
        f"speedup on 8, {label}, {strategy}": PaperPrediction(
            speedup(ours), speedup(fitted), spent, assumed, used, reason
        ),
    }


def _seconds(label: str, strategy: str) -> float:
    return theirs(TABLE, f"exchange of 5,120 images, {label}, {strategy}")


def _bytes(name: str) -> float:
    """Return the bytes that a rank of 8 sends in an allreduce of a network's gradients."""
    return 2 * 7 / 8 * 4 * parameters_of(name)


def _exchanged(label: str) -> float:
    """Return the bytes that a rank sends for 5,120 images."""
    name, batch, *_ = CLUSTER[label]
    return IMAGES // (8 * batch) * _bytes(name)


def _solve(large: float, small: float) -> tuple[float, float]:
    """Return seconds per byte and per array from the seconds of ASA for AlexNet-128b and GoogLeNet-32b."""
    counts = [IMAGES // (8 * CLUSTER[label][1]) for label in ("AlexNet-128b", "GoogLeNet-32b")]
    once = [large / counts[0], small / counts[1]]
    (bytes_0, arrays_0), (bytes_1, arrays_1) = ((_bytes(name), ARRAYS[name]) for name in ("alexnet", "googlenet"))
    determinant = bytes_0 * arrays_1 - bytes_1 * arrays_0
    per_byte = (once[0] * arrays_1 - once[1] * arrays_0) / determinant
    return per_byte, (bytes_0 * once[1] - bytes_1 * once[0]) / determinant


def _mxnet() -> Predictions:
    computing = 32 * training_flops("inception_bn") / p100_flops()
    exchange = exchange_seconds("ring", "minsky_p100", 32, 4 * parameters_of("inception_bn"))
    funnel, chain = computing + exchange, max(computing, exchange)
    reason = (
        "all of the exchange exposed, or all hidden: 1.6 needs an exchange of 60% of the computing's "
        f"{1e3 * computing:.0f} ms, and the links take {1e3 * exchange:.0f} ms. The missing inputs are the batch, and "
        "the time of copies and sums in the node"
    )
    quantity = "funnel over dependency chaining, Inception-BN, 128 P100"
    return {
        "mxnet-mpi-figure-14": {
            quantity: PaperPrediction(funnel / chain, assumptions=(PUBLISHED, BATCH), reason=reason)
        }
    }
