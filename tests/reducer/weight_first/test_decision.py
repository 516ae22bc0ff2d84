"""One fact of a call is enough to keep PyTorch's order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from unisono.reducer.weight_first.decision import SMALLEST_PRODUCT, LayerCall, call_of, pays, plain
from unisono.reducer.weight_first.readings import Readings

GOOD = LayerCall(ranks=2, differentiated=True, hooked=False, operations=SMALLEST_PRODUCT)


def test_a_large_plain_call_pays() -> None:
    assert pays(GOOD)


@pytest.mark.parametrize(
    "fact",
    [{"ranks": 1}, {"differentiated": False}, {"hooked": True}, {"operations": SMALLEST_PRODUCT - 1}],
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


class Own(torch.nn.Parameter):
    """Parameter of the program's own class."""


REAL = torch.ones(2, 2)
OTHERS = {
    "subclass": torch.ones(2, 2).as_subclass(Own),
    "complex": REAL.to(torch.complex64),
    "sparse": REAL.to_sparse(),
    "nested": torch.nested.nested_tensor([REAL, REAL]),
    "proxy": torch.fx.Graph().placeholder("inputs"),
}


@pytest.mark.parametrize("place", range(3), ids=["inputs", "weight", "bias"])
@pytest.mark.parametrize("name", OTHERS)
def test_each_tensor_has_to_be_plain(name: str, place: int) -> None:
    given: list[Any] = [REAL, torch.nn.Parameter(REAL), torch.nn.Parameter(REAL[0])]
    assert plain(*given)
    assert plain(*given[:2], None)
    given[place] = OTHERS[name]
    assert not plain(*given)


class Watched(TorchFunctionMode):
    """Mode that sees the functions of PyTorch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function": Watched,
    "dispatch": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_keep_the_order(name: str) -> None:
    assert plain(REAL, REAL, None)
    with MODES[name]():
        assert not plain(REAL, REAL, None)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # programs still use it
def test_transforms_keep_the_order() -> None:
    found = list[bool]()

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        found.append(plain(REAL, REAL, None))
        return inputs.sum()

    torch.func.grad(loss)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2)))
    torch.jit.trace(loss, torch.ones(2, 2), check_trace=False)
    assert found == [False] * 3
