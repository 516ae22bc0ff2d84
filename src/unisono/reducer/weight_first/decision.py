"""Decision for one call of a layer: the weight gradient first, or PyTorch's order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from unisono.reducer.weight_first.readings import Reading

SMALLEST_PRODUCT = 10_000_000
"""Operations of an input gradient from which on it pays: 0.1 ms or more on a core of 100 GFLOP/s, of which two more
nodes of the graph take 13 microseconds."""


class LayerCall(NamedTuple):
    """Facts of a layer's call that the decision depends on."""

    ranks: int
    """Number of ranks that exchange the gradient."""
    differentiated: bool
    """True where gradients of both the input and the weight are recorded."""
    plain: bool
    """True where the input and the products are PyTorch's own: no subclass, no autocast, no transform, no tracing."""
    hooked: bool
    """True where the program has hooks of its own on the weight's gradient, which may change the weight."""
    operations: int
    """Multiplications and additions of the input gradient."""


def pays(call: LayerCall) -> bool:
    """Return True where the weight gradient is to be computed first.

    >>> pays(LayerCall(ranks=4, differentiated=True, plain=True, hooked=False, operations=10**9))
    True
    >>> pays(LayerCall(ranks=4, differentiated=False, plain=True, hooked=False, operations=10**9))
    False
    """
    large = call.operations >= SMALLEST_PRODUCT
    return call.ranks > 1 and call.differentiated and call.plain and not call.hooked and large


def call_of(reading: Reading, inputs: torch.Tensor, weight: torch.Tensor, operations: int) -> LayerCall:
    """Return the facts of a call."""
    differentiated = torch.is_grad_enabled() and inputs.requires_grad and weight.requires_grad
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    plain = (
        type(inputs) in (torch.Tensor, torch.nn.Parameter) and not transformed and torch._C._get_tracing_state() is None
    )
    plain = plain and not torch.is_autocast_enabled(inputs.device.type)
    hooked = len(weight._post_accumulate_grad_hooks or ()) > 1  # the first is the reducer's
    return LayerCall(reading.readings.ranks, differentiated, plain, hooked, operations)
