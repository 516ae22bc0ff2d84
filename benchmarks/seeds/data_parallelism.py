"""FLOPs and bytes of a layer in data parallelism: PCL-DNN section 3.1.

Each node has all weights and its own samples. It sends its part of the gradient, and receives updated weights:

    node 0    samples 0 ─▶ gradient ─┐                      ┌─▶ weights
    node 1    samples 1 ─▶ gradient ─┼─ sum, then update ───┼─▶ weights
    node 2    samples 2 ─▶ gradient ─┘                      └─▶ weights

    Comp = 3 passes * 2 samples ifm ofm kw kh ow oh            FLOPs of a node; the first layer has two passes
    Comm = size ifm ofm kw kh (2 - overlap)                    bytes; overlap 1: sends run beside receives
    Comp / Comm = 1.5 ow oh samples                            float32, overlap 1: neither channels nor kernel count

Worked example: C5 of OverFeat-FAST, 12x12 outputs: 1.5 * 144 = 216 FLOPs a byte for each sample of a node. A node of
2.36 TFLOP/s on a link of 7 GB/s computes 336 in the time of a byte, so 2 samples hide the layer's exchange.
"""

from __future__ import annotations

from benchmarks.seeds.convolution_loops import FLOAT32_BYTES, ConvolutionLoops

PASSES = 3
"""Passes of a layer in a step: forward, gradient of the inputs, gradient of the weights."""


def step_flops(loops: ConvolutionLoops, samples: float, first: bool = False) -> float:
    """Return the FLOPs of a step for a node's samples. The first layer needs no gradient of its inputs."""
    return (PASSES - first) * loops.flops(samples)


def exchanged_bytes(weights: int, overlap: float = 1, size: int = FLOAT32_BYTES) -> float:
    """Return the bytes that a node exchanges for these weights; `overlap` is the share of sends beside receives."""
    return size * weights * (2 - overlap)


def flops_per_byte(loops: ConvolutionLoops, samples: float, overlap: float = 1, size: int = FLOAT32_BYTES) -> float:
    """Return the FLOPs of a layer for each byte of its exchange.

    >>> flops_per_byte(ConvolutionLoops(512, 1024, (12, 12), (3, 3)), samples=1)
    216.0
    """
    return step_flops(loops, samples) / exchanged_bytes(loops.weights, overlap, size)
