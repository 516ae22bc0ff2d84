"""One fact of a call is enough to keep PyTorch's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.reducer.weight_first.decision import SMALLEST_PRODUCT, LayerCall, call_of, pays
from unisono.reducer.weight_first.readings import Readings

GOOD = LayerCall(ranks=2, differentiated=True, plain=True, hooked=False, operations=SMALLEST_PRODUCT)


def test_a_large_plain_call_pays() -> None:
    assert pays(GOOD)


@pytest.mark.parametrize(
    "fact",
    [{"ranks": 1}, {"differentiated": False}, {"plain": False}, {"hooked": True}, {"operations": SMALLEST_PRODUCT - 1}],
    ids=str,
)
def test_each_other_fact_keeps_the_order(fact: dict[str, Any]) -> None:
    assert not pays(GOOD._replace(**fact))


def facts(inputs: torch.Tensor, weight: torch.Tensor) -> LayerCall:
    reading = Readings([weight], 2, lambda: None).of(weight)
    assert reading is not None
    return call_of(reading, inputs, weight, SMALLEST_PRODUCT)


def test_the_facts_of_a_plain_call() -> None:
    weight, inputs = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert facts(inputs, weight) == GOOD
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert facts(inputs, weight).hooked
    assert not facts(inputs.detach(), weight).differentiated
    assert not facts(inputs, weight.detach()).differentiated
    with torch.no_grad():
        assert not facts(inputs, weight).differentiated
    with torch.autocast("cpu"):
        assert not facts(inputs, weight).plain


def test_transforms_keep_the_order() -> None:
    weight, found = torch.nn.Parameter(torch.ones(2, 2)), list[LayerCall]()

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        found.append(facts(inputs, weight))
        return inputs.sum()

    torch.func.grad(loss)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2)))
    torch.jit.trace(loss, torch.ones(2, 2), check_trace=False)
    assert [one.plain for one in found] == [False] * 3
