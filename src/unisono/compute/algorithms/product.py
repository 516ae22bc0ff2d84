"""A 1 x 1 convolution as one matrix product.

    inputs   (pixels, in_channels)   one row per pixel, as in channels-last memory
    outputs  (pixels, out_channels)  =  inputs  weight^T

With a stride, the pixels that the kernel reads are selected first; the gradient of the others is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, to_nchw, to_nhwc


def fits(geometry: Geometry) -> bool:
    """Return True for a 1 x 1 kernel over all channels, without padding."""
    return geometry.kernel == (1, 1) and geometry.padding == (0, 0) and geometry.groups == 1


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    outputs = _strided_pixels(geometry, inputs) @ weight.flatten(1).t()
    return to_nchw(outputs.view(geometry.samples, *geometry.output_size, geometry.out_channels))


def grad_input(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    slopes = to_nhwc(gradient).view(-1, geometry.out_channels) @ weight.flatten(1)
    slopes = slopes.view(geometry.samples, *geometry.output_size, geometry.in_channels)
    if geometry.stride == (1, 1):
        return to_nchw(slopes)
    out = slopes.new_zeros(geometry.samples, *geometry.size, geometry.in_channels)
    out[:, :: geometry.stride[0], :: geometry.stride[1]] = slopes
    return to_nchw(out)


def grad_weight(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    slopes = to_nhwc(gradient).view(-1, geometry.out_channels).t() @ _strided_pixels(geometry, inputs)
    return slopes.view(geometry.out_channels, geometry.in_channels, 1, 1)


def _strided_pixels(geometry: Geometry, inputs: Tensor) -> Tensor:
    """Return the pixels that the kernel reads, one per row."""
    down, right = geometry.stride
    return torch.reshape(to_nhwc(inputs)[:, ::down, ::right], (-1, geometry.in_channels))


PRODUCT = ConvolutionAlgorithm(fits, forward, grad_input, grad_weight)
