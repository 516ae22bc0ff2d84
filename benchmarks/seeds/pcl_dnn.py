"""PCL-DNN's figures: bytes per FLOP, register blocks, table 1, figures 3, 4, 6 and 7."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil

from benchmarks.seeds.cache_blocks import CacheLimits, search
from benchmarks.seeds.convolution_loops import ConvolutionLoops, cached_bytes_per_flop, unblocked_bytes_per_flop
from benchmarks.seeds.data_parallelism import exchanged_bytes
from benchmarks.seeds.groups import LayerShape, moved_hybrid_bytes
from benchmarks.seeds.networks import classes_of, convolutions_of, flops_of, layers_of, moved_bytes
from benchmarks.seeds.overlap import Layer, Machine, least_samples, max_nodes
from benchmarks.seeds.register_blocks import forward_efficiency, grad_weight_efficiency
from benchmarks.seeds.theirs import Predictions, theirs

from unisono.papers.figures import PaperPrediction
from unisono.plan.machines import MachineFacts, NetworkRow, find_machine
from unisono.plan.planned_run import product_seconds
from unisono.plan.run_plan import RunPlan, epoch_seconds, plan_run
from unisono.training.recipe_plan import plan_recipe, planned_run

C5 = ConvolutionLoops(512, 1024, (12, 12), (3, 3))
"""Layer of OverFeat-FAST that the paper's examples are about."""

NETWORKS = {"OverFeat-FAST": "overfeat_fast", "VGG-A": "vgg_a"}

IMAGENET = 1_200_000
"""Images of ImageNet-1k."""

CLOCKS = {"cori_aries": 1.9 / 2.3}
"""Share of the nominal clock that a machine's products run at."""

CORES_TAKEN = {"cori_aries": 1, "endeavor": 1, "aws_c4_8xlarge": 2}
"""Cores of a node that compute no products."""

MEMORY_BANDWIDTH = 102e9
"""Bytes per second of a node's memory in use."""

EFFICIENCY = (
    "computing by the paper's 'about 90%' for convolutions and 'about 70%' for fully connected layers, on all cores "
    "but one for its threads of data and of messages (its 4); other layers and updates by plain SGD at 102 GB/s, "
    "STREAM on two processors of this family (Puget Systems, 2014)"
)
CLOCK = (
    "Cori: 1.9 GHz, the AVX base clock of this family's parts of 2.3 GHz (AnandTech, 2014); the paper's 1.7 TFLOP/s of "
    "28 cores are 1.9 GHz as well"
)
LATER = "the efficiencies are those of the best layers; of whole networks the paper gives none"
STRONG = (
    "the paper's measured scaling has load imbalance, software overhead and bandwidths that fall with the message "
    "(its 3.2); the prediction has none of them. Beside computing at one node's rate a step took {theirs:.0f} ms more, "
    "the predicted one {ours:.0f}"
)
ARIES = "Aries: 7 GB/s and 1.3 us, as in machines/cori_aries.toml; the paper gives none"
CLOUD = (
    "10 Gbit/s Ethernet: 25 us a transfer; the paper gives none; a core more to interrupts (its 5.3); 2.9 GHz: the "
    "vendor gives no clock for AVX of this processor"
)
ENDEAVOR = "Endeavor: 7 GB/s and 1 us, as in machines/endeavor.toml; the paper names no network"
ABSTRACT = "pcl-dnn-section-abstract"
TABLE_1, FIGURE_3, FIGURE_4, FIGURE_6, FIGURE_7 = (
    f"pcl-dnn-{place}" for place in ("table-1", "figure-3", "figure-4", "figure-6", "figure-7")
)
SPEECH_BATCH = 256
"""Minibatch of CD-DNN's frames: that of the paper's other runs."""
SPEECH = (
    f"CD-DNN: 440 inputs, 9,304 outputs (Seide et al. 2011) and a minibatch of {SPEECH_BATCH}, that of the paper's "
    "other runs; figure 7 names neither"
)
GROUPS = (
    "layers in groups of their own sizes beside data parallel ones (its 3.3, 3.4), as `unisono plan` chooses them: the "
    "paper does not give its groups"
)


def predictions() -> Predictions:
    """Return the predictions of the paper's figures and sections."""
    return {**_one_node(), **_table_1(), **_groups(), **_throughput(), **_cori(), **_cloud(), **_speech()}


def _one_node() -> Predictions:
    block = search(C5, CacheLimits(find_machine("cori_fdr").node.cache_bytes))
    seldom = "the equation gives 0.003 at 6 samples; at the 256 of the paper's runs, 0.0008"
    rows = "sums for one row of 12 outputs at a time"
    return {
        "pcl-dnn-section-2.2": {
            "B/F of C5, nothing in cache": PaperPrediction(unblocked_bytes_per_flop(C5)),
            "B/F of C5, all in cache, minibatch 256": PaperPrediction(cached_bytes_per_flop(C5, 256), reason=seldom),
            "B/F of C5 in blocks of 128 KB, at most": PaperPrediction(block.bytes_per_flop(1)),
        },
        "pcl-dnn-section-2.4": {
            "efficiency of C5's register block": PaperPrediction(forward_efficiency(12, (3, 3))),
            "efficiency of a 3x3 kernel as block of grad_weight": PaperPrediction(
                grad_weight_efficiency(9, 12), assumptions=(rows,)
            ),
        },
    }


def data_parallel_layers(name: str) -> list[Layer]:
    """Return the convolutions of a network for one sample; sends run beside receives, as in the paper's table 1."""
    return [Layer(flops_of(layer), exchanged_bytes(layer.parameters)) for layer in convolutions_of(name)]


def _table_1() -> Predictions:
    layer_sum = (
        "208 and 1,456 do not follow from sums over these networks' layers: the equations of 3.1, with overlap 1, "
        "give ours, and without the computing of the first two layers 207 and 1,053"
    )
    rounding = (
        "ours is at least 1 point and at most 256 nodes, not rounded; the paper's points are its ratio of the link "
        "over that of the network, rounded up"
    )
    ratios, table = dict[str, PaperPrediction](), dict[str, PaperPrediction]()
    for label, name in NETWORKS.items():
        layers = data_parallel_layers(name)
        flops = sum(layer.computing for layer in layers) / sum(layer.communication for layer in layers)
        ratios[f"FLOPs per byte, convolutions of {label}"] = PaperPrediction(flops, reason=layer_sum)
    for machine_name, link in (("aws_c4_8xlarge", "10 GbE"), ("cori_fdr", "FDR")):
        machine = find_machine(machine_name)
        speed = Machine(machine.node.flops, machine.link.bandwidth)
        balance = f"FLOPs in the time of a byte, {link}"
        table[balance] = PaperPrediction(speed.computing / speed.communication)
        for label, name in NETWORKS.items():
            layers, place = data_parallel_layers(name), f"{label}, {link}"
            ratio = theirs("pcl-dnn-section-3.1", f"FLOPs per byte, convolutions of {label}")
            points = max(1, ceil(theirs(TABLE_1, balance) / ratio))
            used = f"its {ratio:,.0f} FLOPs a byte of {label}: the link's ratio over it, rounded up, and 256 over that"
            fits = points <= theirs(TABLE_1, f"points a node, {place}")
            reason = rounding if fits else f"3 points do not follow from the paper's ratios either, which give {points}"
            samples, most = least_samples(layers, speed), max_nodes(layers, speed, 256)
            table[f"points a node, {place}"] = PaperPrediction(max(1.0, samples), points, used=used, reason=reason)
            table[f"nodes for 256, {place}"] = PaperPrediction(min(256.0, most), 256 / points, used=used, reason=reason)
    return {"pcl-dnn-section-3.1": ratios, TABLE_1: table}


def _groups() -> Predictions:
    """Return the groups that send least, and what 3 groups send, without the bytes of a node's own part."""
    wide, own_part = LayerShape(4096, 4096), "its equation has a node's own part as well, which it need not send: 277"
    sent = [moved_hybrid_bytes(wide, 256, 64, groups) / (8 * 4096) for groups in range(1, 65)]
    reason = (
        f"2 groups send {sent[1]:.0f}, 3 send {sent[2]:.0f}: by its closed form, sqrt(64 * 256 / 4096), it is 2 as well"
    )
    least = PaperPrediction(1 + sent.index(min(sent)), assumptions=(own_part,), reason=reason)
    return {
        "pcl-dnn-section-3.3": {
            "groups of 64 nodes, 4,096 outputs, minibatch 256": least,
            "volume of 3 groups, in 8 ifm bytes": PaperPrediction(sent[2], assumptions=(own_part,)),
        }
    }


@cache
def in_use(name: str) -> MachineFacts:
    """Return a machine with the peak of the clock and of the cores that compute, and with the rate of its memory."""
    machine = find_machine(name)
    share = CLOCKS.get(name, 1.0) * (1 - CORES_TAKEN[name] / machine.node.cores)
    flops = machine.node.flops * share
    return replace(machine, node=replace(machine.node, flops=flops, memory_bandwidth=MEMORY_BANDWIDTH))


def images_per_second(name: str, machine: MachineFacts, training: bool = True) -> float:
    """Return the samples per second of one node: products at the efficiency of their kind, others at memory's rate."""
    products = sum(product_seconds(layer, flops_of(layer, training), machine) for layer in layers_of(name))
    return 1 / (products + moved_bytes(name, training) / machine.node.memory_bandwidth)


def _throughput() -> Predictions:
    cori = in_use("cori_aries")
    passes = (
        "7.6 G multiply-adds of 2 FLOPs in three passes (two in the first layer) are 45.5; 33.6 is 2.2 passes, which "
        "the paper does not explain"
    )
    flops = sum(flops_of(layer) for layer in layers_of("vgg_a")) / 1e9
    measured = theirs(FIGURE_3, "images/s of a node, VGG-A, scoring")
    share = measured / images_per_second("vgg_a", cori, training=False)
    used = f"figure 3's {measured:g} images/s of VGG-A's scoring: all products at {share:.0%} of that efficiency"
    table = {}
    for label, name in NETWORKS.items():
        for kind in ("scoring", "training"):
            ours, spent = images_per_second(name, cori, kind == "training"), (name, kind) == ("vgg_a", "scoring")
            table[f"images/s of a node, {label}, {kind}"] = PaperPrediction(
                ours, None if spent else share * ours, spent, (EFFICIENCY, CLOCK), used, LATER
            )
    return {"pcl-dnn-section-1": {"work of an image, VGG-A": PaperPrediction(flops, reason=passes)}, FIGURE_3: table}


@cache
def planned(name: str, machine_name: str, minibatch: int, nodes: int) -> RunPlan:
    """Return the faster row of `unisono plan` on nodes of a machine in use, of which one makes `images_per_second`:
    with split layers, or without."""
    changes = [f"training.batch={minibatch}", f"samples.classes={classes_of(name)}", "optimizer.momentum=0"]
    machine = in_use(machine_name)
    row = NetworkRow(name, minibatch, images_per_second(name, machine))
    run = planned_run(plan_recipe(None, name, changes), replace(machine, networks=(row,)), nodes)
    return min(plan_run(run, (nodes,)), key=lambda row: row.step)


def with_overhead(rate: float, minibatch: int, nodes: int, overhead: float) -> tuple[float, float]:
    """Return samples per second and speedup of nodes that make `rate` a second each, and lose `overhead` s a step."""
    step = minibatch / nodes / rate + overhead
    return minibatch / step, minibatch / step / rate


def not_hidden(rate: float, minibatch: int, nodes: int, speedup: float, plan: RunPlan) -> str:
    """Return the reason of a speedup, with what its step loses beside computing at a node's rate, and a plan's."""
    more = minibatch / nodes / rate * (nodes / speedup - 1)
    return STRONG.format(theirs=1e3 * more, ours=1e3 * (plan.step - plan.computing))


def _cori() -> Predictions:
    """Return speedups on Cori; of theirs, rates of a node, and what a step loses on 64 nodes beside computing."""
    cori, assumed = "cori_aries", (EFFICIENCY, CLOCK, ARIES, GROUPS)
    alone = {label: theirs(FIGURE_3, f"images/s of a node, {label}, training") for label in NETWORKS}
    known = "speedup, VGG-A, minibatch 256, 64 nodes"
    overhead = 256 / alone["VGG-A"] * (1 / theirs(FIGURE_4, known) - 1 / 64)
    used = (
        "figure 3's rate of a node, and what a step of VGG-A loses on 64 nodes of figure 4 "
        f"beside its computing, {1e3 * overhead:.0f} ms"
    )
    rows = (("OverFeat-FAST", 256, 64), ("VGG-A", 256, 64), ("VGG-A", 512, 128))
    table = {}
    for label, batch, nodes in rows:
        quantity = f"speedup, {label}, minibatch {batch}, {nodes} nodes"
        plan, (_, fitted) = (
            planned(NETWORKS[label], cori, batch, nodes),
            with_overhead(alone[label], batch, nodes, overhead),
        )
        spent, place = quantity == known, FIGURE_4 if label == "VGG-A" else ABSTRACT
        reason = not_hidden(alone[label], batch, nodes, theirs(place, quantity), plan)
        table[quantity] = PaperPrediction(plan.speedup, None if spent else fitted, spent, assumed, used, reason)
    step = planned("vgg_a", cori, 512, 128).step
    rate, _ = with_overhead(alone["VGG-A"], 512, 128, overhead)
    table["images/s, VGG-A, 128 nodes"] = PaperPrediction(512 / step, rate, False, assumed, used, f"{LATER}; {reason}")
    minutes = (epoch_seconds(IMAGENET, 512, each) / 60 for each in (step, 512 / rate))
    table["an epoch, VGG-A, 128 nodes, at most"] = PaperPrediction(*minutes, False, assumed, used)
    first, *rest = table
    return {
        ABSTRACT: {first: table[first]},
        FIGURE_4: {quantity: table[quantity] for quantity in rest},
    }


def _cloud() -> Predictions:
    """Return rates and speedups on AWS; of theirs, both of VGG-A: the rate of a node, and what a step loses."""
    aws, table, assumed = "aws_c4_8xlarge", {}, (EFFICIENCY, CLOUD, GROUPS)
    rate, times = (theirs(FIGURE_6, f"{what}, VGG-A, 16 nodes") for what in ("images/s", "speedup"))
    share = rate / times / (256 / planned("vgg_a", aws, 256, 1).step)
    overhead = 256 / rate - 256 / 16 / (rate / times)
    used = (
        f"figure 6's rate and speedup of VGG-A: a node at {share:.0%} of the planned rate, and "
        f"{1e3 * overhead:.0f} ms that a step loses beside computing"
    )
    for label, name in NETWORKS.items():
        step, spent = planned(name, aws, 256, 16), label == "VGG-A"
        alone = share * 256 / planned(name, aws, 256, 1).step
        fitted = (None, None) if spent else with_overhead(alone, 256, 16, overhead)
        speedup, measured = (theirs(FIGURE_6, f"{what}, {label}, 16 nodes") for what in ("speedup", "images/s"))
        strong = not_hidden(measured / speedup, 256, 16, speedup, step)
        for what, ours, theirs_used, reason in (
            ("speedup", step.speedup, fitted[1], strong),
            ("images/s", 256 / step.step, fitted[0], LATER),
        ):
            table[f"{what}, {label}, 16 nodes"] = PaperPrediction(ours, theirs_used, spent, assumed, used, reason)
    return {FIGURE_6: table}


def _speech() -> Predictions:
    endeavor, assumed = "endeavor", (EFFICIENCY, ENDEAVOR, SPEECH, GROUPS)
    steps = {nodes: planned("cd_dnn", endeavor, SPEECH_BATCH, nodes) for nodes in (1, 4, 16)}
    larger = ", ".join(f"{planned('cd_dnn', endeavor, batch, 16).speedup:.1f} with {batch:,}" for batch in (1024, 5120))
    reason = (
        f"the minibatch decides, and the figure does not name it: the speedup on 16 is {larger}; updates of 45 million "
        "weights are 8% of a node's step with 256"
    )
    one, four = (theirs(FIGURE_7, f"frames/s, CD-DNN, {label}") for label in ("1 node", "4 nodes"))
    overhead = SPEECH_BATCH / four - SPEECH_BATCH / 4 / one
    used = f"its rates on 1 and 4 nodes: {1e3 * overhead:.1f} ms that a step loses beside computing"
    rate, speedup = with_overhead(one, SPEECH_BATCH, 16, overhead)
    table = {}
    for nodes, fitted in ((1, None), (4, None), (16, rate)):
        quantity = f"frames/s, CD-DNN, {nodes} node{'s' * (nodes > 1)}"
        table[quantity] = PaperPrediction(
            SPEECH_BATCH / steps[nodes].step, fitted, fitted is None, assumed, used, reason
        )
    table["speedup, CD-DNN, 16 nodes"] = PaperPrediction(steps[16].speedup, speedup, False, assumed, used, reason)
    return {FIGURE_7: table}
