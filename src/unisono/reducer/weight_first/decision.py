"""Decision for one call of a layer: the weight gradient first, or PyTorch's order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from unisono.reducer.weight_first.readings import Reading

SMALLEST_PRODUCT = 10_000_000
"""Operations of an input gradient from which on it pays: 0.1 ms or more on a core of 100 GFLOP/s, of which two more
nodes of the graph take 13 microseconds."""


PLAIN = torch.Tensor, torch.nn.Parameter
"""Classes of plain tensors. A subclass may have products and gradients of its own; a tracer's proxy is no tensor."""


def plain(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return True where a call's products are PyTorch's own, of real numbers in dense memory, and nothing watches them.

    Modes of `__torch_function__` and `__torch_dispatch__` (selective checkpointing, a default device), transforms,
    autocast and tracing see the operations of a layer, or change them.
    """
    given = (inputs, weight) if bias is None else (inputs, weight, bias)
    if torch.compiler.is_compiling() or any(type(one) not in PLAIN for one in given):
        return False
    if any(one.is_complex() or one.is_nested or one.layout is not torch.strided for one in given):
        return False
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    traced = torch._C._get_tracing_state() is not None
    return not (modes or transformed or traced or torch.is_autocast_enabled(inputs.device.type))


class LayerCall(NamedTuple):
    """Facts of a plain call of a layer that the decision depends on."""

    ranks: int
    """Number of ranks that exchange the gradient."""
    differentiated: bool
    """True where gradients of both the input and the weight are recorded."""
    hooked: bool
    """True where the program has hooks of its own on the weight's gradient, which may change the weight."""
    operations: int
    """Multiplications and additions of the input gradient."""


def pays(call: LayerCall) -> bool:
    """Return True where the weight gradient is to be computed first.

    >>> pays(LayerCall(ranks=4, differentiated=True, hooked=False, operations=10**9))
    True
    >>> pays(LayerCall(ranks=4, differentiated=False, hooked=False, operations=10**9))
    False
    """
    large = call.operations >= SMALLEST_PRODUCT
    return call.ranks > 1 and call.differentiated and not call.hooked and large


def call_of(reading: Reading, inputs: torch.Tensor, weight: torch.Tensor, operations: int) -> LayerCall:
    """Return the facts of a plain call."""
    differentiated = torch.is_grad_enabled() and inputs.requires_grad and weight.requires_grad
    hooked = len(weight._post_accumulate_grad_hooks or ()) > 1  # the first is the reducer's
    return LayerCall(reading.readings.ranks, differentiated, hooked, operations)
