"""A convolution of 1 x 1 as a plain matrix product.

    inputs   (samples x places, before)   one row a place, as channels-last memory has them
    outputs  (samples x places, after)  =  inputs  weight^T

With a stride, the pixels that the kernel reads are selected first; the gradient of the others is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.compute.geometry import Geometry, image, rows
from unisono.compute.ways.way import Way


def fits(geometry: Geometry) -> bool:
    """Return True for a 1 x 1 kernel over all channels, without padding."""
    return geometry.kernel == (1, 1) and geometry.padding == (0, 0) and geometry.groups == 1


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs."""
    found = _seen(geometry, inputs) @ weight.flatten(1).t()
    return image(found.view(geometry.samples, *geometry.places, geometry.after))


def input_gradient(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs."""
    found = rows(gradient).view(-1, geometry.after) @ weight.flatten(1)
    found = found.view(geometry.samples, *geometry.places, geometry.before)
    if geometry.stride == (1, 1):
        return image(found)
    whole = found.new_zeros(geometry.samples, *geometry.size, geometry.before)
    whole[:, :: geometry.stride[0], :: geometry.stride[1]] = found
    return image(whole)


def weight_gradient(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the weight."""
    found = rows(gradient).view(-1, geometry.after).t() @ _seen(geometry, inputs)
    return found.view(geometry.after, geometry.before, 1, 1)


def _seen(geometry: Geometry, inputs: Tensor) -> Tensor:
    """Return the pixels that the kernel reads, one a row."""
    down, right = geometry.stride
    return torch.reshape(rows(inputs)[:, ::down, ::right], (-1, geometry.before))


PRODUCT = Way(fits, forward, input_gradient, weight_gradient)
