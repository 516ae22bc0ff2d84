"""PCL-DNN's equations for the layers of a network on a machine: cache and register blocks, bytes, overlap, groups.

python -m benchmarks.seeds.layers overfeat_fast --machine cori_fdr --samples 16 --nodes 16

    layer       a convolution or a fully connected layer; one in groups counts as one of its groups in B/F and blocks
    B/F         bytes from memory for each FLOP: nothing in cache, all in cache, in the best block of the cache
    block       samples x input channels x output channels x rows x columns x kernel that stays in cache
    sums        rows x columns of outputs that stay in registers (samples of a fully connected layer), with the share of
                cycles that make products; c: input channels that share the registers of the gradient of the weights
    FLOP/byte   Comp / Comm: FLOPs of a step for each byte of its exchange; ms: hidden by ocomp, sent by ocomms, bubble
    model ms    forward pass of model parallelism on all nodes, without overlap, for the samples of all nodes
    better      the parallelism that sends less, data or model
    G           groups of nodes that send least

No kernel of Unisono uses these blocks: oneDNN chooses its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import accumulate, product

import torch
from benchmarks.seeds.cache_blocks import CacheLimits, search
from benchmarks.seeds.convolution_loops import ConvolutionLoops, cached_bytes_per_flop, unblocked_bytes_per_flop
from benchmarks.seeds.data_parallelism import exchanged_bytes, step_flops
from benchmarks.seeds.groups import LayerShape, model_forward_seconds, prefers_model_parallelism, whole_groups
from benchmarks.seeds.networks import classes_of, shape_of
from benchmarks.seeds.overlap import Layer, Machine, bubbles, max_nodes, worst_bubble_efficiency
from benchmarks.seeds.register_blocks import E5_V3, forward_efficiency, grad_weight_channels
from torch import nn

from unisono.bench.layers import BenchLayer, layers_of
from unisono.formats import text_table
from unisono.models import MODELS
from unisono.plan.machines import find_machine

CACHE_BYTES = 128 << 10
"""Cache of a thread where the machine's file names none: PCL-DNN's."""

HEADS = (
    "layer",
    "B/F none",
    "all",
    "block",
    "block",
    "sums",
    "busy",
    "c",
    "FLOP/byte",
    "ocomp",
    "ocomms",
    "bubble",
    "model ms",
    "better",
    "G",
)


def loops_of(layer: BenchLayer) -> tuple[ConvolutionLoops, int]:
    """Return the loops of one group of a layer, and the number of groups."""
    module = layer.module
    if isinstance(module, nn.Linear):
        return ConvolutionLoops(module.in_features, module.out_features), 1
    assert isinstance(module, nn.Conv2d), module
    (down, right), (rows, columns), groups = module.kernel_size, layer.outputs[2:], module.groups
    inputs, outputs = module.in_channels // groups, module.out_channels // groups
    return ConvolutionLoops(inputs, outputs, (rows, columns), (down, right), module.stride[0]), groups


def register_block(loops: ConvolutionLoops, samples: int) -> tuple[int, int]:
    """Return rows and columns of outputs, without a rest, with the largest share of cycles that make products."""
    rows, columns = loops.outputs if loops.outputs != (1, 1) else (1, samples)
    sizes = [
        (high, wide)
        for high, wide in product(range(1, E5_V3.most_sums + 1), repeat=2)
        if high * wide <= E5_V3.most_sums and rows % high == columns % wide == 0
    ]
    return max(sizes, key=lambda size: forward_efficiency(size[0] * size[1], loops.kernel))


def rows_of(name: str, machine_name: str, samples: int, nodes: int) -> Iterator[list[str]]:
    """Yield the cells of each layer, and the nodes and the efficiency that follow from all."""
    machine = find_machine(machine_name)
    limits = CacheLimits(machine.node.cache_bytes or CACHE_BYTES)
    speed = Machine(machine.node.flops, machine.link.bandwidth)
    with torch.device("meta"):
        model = MODELS.load(name)(classes_of(name), shape_of(name)[0])
    layers = [
        layer
        for layer in layers_of(model, (samples, *shape_of(name)))
        if isinstance(layer.module, nn.Conv2d | nn.Linear)
    ]
    loops = [loops_of(layer) for layer in layers]
    costs = [
        Layer(groups * step_flops(loop, samples, index == 0), exchanged_bytes(groups * loop.weights))
        for index, (loop, groups) in enumerate(loops)
    ]
    before = [0.0, *accumulate(cost.computing for cost in costs)]
    sent = accumulate(cost.communication for cost in costs)
    for layer, (loop, groups), cost, done, to_send, bubble in zip(
        layers, loops, costs, before, sent, bubbles(costs, speed), strict=False
    ):
        block, sums = search(loop, limits), register_block(loop, samples)
        (ih, iw), (oh, ow), area = layer.inputs[2:] or (1, 1), loop.outputs, loop.kernel[0] * loop.kernel[1]
        shape = LayerShape(groups * loop.in_channels, loop.out_channels, area, ih * iw, oh * ow)
        setting = shape, samples * nodes, nodes
        yield [
            layer.name,
            *(f"{each:.4f}" for each in (unblocked_bytes_per_flop(loop), cached_bytes_per_flop(loop, samples))),
            f"{block.bytes_per_flop(loop.stride):.4f}",
            "x".join(map(str, block)),
            "x".join(map(str, sums)),
            f"{forward_efficiency(sums[0] * sums[1], loop.kernel):.2f}",
            str(grad_weight_channels(loop.kernel[1])),
            f"{cost.computing / cost.communication:,.0f}",
            f"{1e3 * (done + cost.computing / 3) / speed.computing:.2f}",
            f"{1e3 * to_send / speed.communication:.2f}",
            f"{1e3 * bubble:.2f}",
            f"{1e3 * model_forward_seconds(*setting, speed, machine.link.latency):.2f}",
            "model" if prefers_model_parallelism(shape, samples * nodes) else "data",
            str(whole_groups(*setting)),
        ]
    most, share = max_nodes(costs, speed, nodes), worst_bubble_efficiency(costs, speed)
    line = f"{samples * nodes} samples a step: the last layer has no bubble on up to {int(most)} nodes"
    yield [f"{line}; with {nodes}, a node computes {share:.0%} of the time"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("--machine", required=True, help="name or file of a machine")
    parser.add_argument("--samples", type=int, default=16, help="samples of a node in a step")
    parser.add_argument("--nodes", type=int, default=16)
    given = parser.parse_args()
    *rows, (last,) = rows_of(given.network, given.machine, given.samples, given.nodes)
    print("\n".join([*text_table([HEADS, *rows], (0, 4)), "", last]))
