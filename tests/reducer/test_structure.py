"""Parameters of a model, compared with those it has later, and with those of other ranks."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.reducer import structure
from unisono.reducer.structure import Structure, broadcast_all, describe, difference, digest


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)), nn.BatchNorm1d(2, affine=False))


def test_an_unchanged_model() -> None:
    model = make()
    model[0].weight.requires_grad_(False)
    structure = Structure(model)
    assert structure.names == ["0.bias", "1.0.weight"]
    assert structure.added(model) is None
    assert not structure.differs(model)


def test_the_order_in_memory_is_compared_where_it_matters() -> None:
    conv, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert difference([describe(conv), describe(other)]).startswith(
        "the models of ranks 0 and 1 differ: rank 0 has parameter weight, (4, 3, 3, 3) of float32, rank 1 has "
        "parameter weight, (4, 3, 3, 3) of float32 with strides (27, 1, 9, 3)"
    )
    for layer in (nn.Conv2d(1, 4, 3), nn.Conv2d(3, 4, 1)):  # a dimension of one element has no order
        before = describe(layer)
        assert describe(layer.to(memory_format=torch.channels_last)) == before


def test_added_replaced_or_unfrozen_parameters_are_named() -> None:
    def unfreeze(model: nn.Sequential) -> None:
        model[0].weight.requires_grad_(True)

    def assign(model: nn.Sequential) -> None:
        model[0].bias = nn.Parameter(torch.zeros(2))

    def replace(model: nn.Sequential) -> None:
        model[1][0] = nn.Linear(2, 2)

    def add(model: nn.Sequential) -> None:
        model.append(nn.Linear(2, 2))

    for change, name in ((unfreeze, "0.weight"), (assign, "0.bias"), (replace, "1.0.weight"), (add, "3.weight")):
        model = make()
        model[0].weight.requires_grad_(False)
        structure = Structure(model)
        change(model)
        assert structure.added(model) == structure.added(model) == name
        assert structure.differs(model)


def test_a_model_that_is_converted_or_resized_later_is_refused() -> None:
    model = nn.Linear(2, 2)
    structure = Structure(model)
    model.double()
    with pytest.raises(UsageError, match=r"weight is \(2, 2\) of torch.float64, and was .*: convert or resize"):
        structure.check_pass(model)
    structure.check(model.float())
    model.weight.data = torch.zeros(3, 2)
    with pytest.raises(UsageError, match=r"weight is \(3, 2\) of torch.float32, and was \(2, 2\) of"):
        structure.check(model)


def test_frozen_or_removed_parameters_are_accepted() -> None:
    model = make()
    structure = Structure(model)
    model[0].requires_grad_(False)
    assert structure.added(model) is None
    model[0].requires_grad_(True)
    assert structure.added(model) is None
    del model[0]
    assert structure.added(model) is None
    assert structure.differs(model)


@pytest.mark.parametrize("make_module", [make, lambda: nn.Linear(2, 2)])
def test_it_holds_no_reference_to_the_model(make_module: type[nn.Module]) -> None:
    model = make_module()
    structure, reference = Structure(model), weakref.ref(model)
    del model
    assert reference() is None
    assert structure.parameters


def test_a_model_is_checked_once_for_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    structure, looks = Structure(model), list[nn.Module]()
    monkeypatch.setattr(structure, "added", looks.append)
    structure.check(model)  # forward
    structure.check_pass(model)
    assert len(looks) == 1
    structure.check_pass(model)  # of a pass without a forward pass
    structure.check_pass(None)
    assert len(looks) == 2


def test_a_pass_of_a_model_that_has_grown_is_refused() -> None:
    model = make()
    structure = Structure(model)
    model.append(nn.Linear(2, 2))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"parameter 3\.weight was added, replaced or unfrozen"):
            structure.check_pass(model)


def test_weights_that_functional_call_lends_are_no_parameters() -> None:
    model = make()
    structure = Structure(model)
    lent = {name: 2 * parameter for name, parameter in model.named_parameters()}
    added: list[str | None] = []
    model.register_forward_pre_hook(lambda *_: added.append(structure.added(model)))
    torch.func.functional_call(model, lent, (torch.zeros(3, 2),))
    reference = weakref.ref(lent.pop("0.weight"))
    assert added == [None]
    assert reference() is None
    assert structure.added(model) is None


def test_models_that_are_alike_have_one_description() -> None:
    assert describe(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))) == describe(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    )


def test_the_first_difference_is_reported_with_both_values() -> None:
    plain, wide, none = (describe(layer) for layer in (nn.Linear(2, 3), nn.Linear(2, 4), nn.Sequential()))
    half, frozen = describe(nn.Linear(2, 3).half()), describe(nn.Linear(2, 3).requires_grad_(False))
    assert (
        "rank 0 has parameter weight, (3, 2) of float32, rank 2 has parameter weight, (4, 2) of float32"
        in difference([plain, plain, wide])
    )
    assert "rank 1 has no more" in difference([plain, none])
    assert "rank 0 has no more" in difference([none, plain])
    assert "rank 1 has parameter weight, (3, 2) of float16" in difference([plain, half])
    assert "rank 1 has parameter weight, (3, 2) of float32, frozen" in difference([plain, frozen])


def test_tied_parameters_differ_from_two() -> None:
    two = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert "the same as parameter 0.weight" in difference([describe(two), describe(tied)])


def test_buffers_count() -> None:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    assert describe(module) == ["buffer mean, (2,) of float32"]


class Rank1:
    """World of two ranks as rank 1 sees it, to which rank 0 sends ones; `sent` has what was broadcast at once."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.numel())
        with torch.inference_mode():  # in which all tensors may be written
            return tensor.fill_(1)


def test_short_tensors_are_broadcast_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MOST_TOGETHER", 3)
    weights = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 2), torch.zeros(3, 2).t(), torch.zeros(1 << 19)]
    numbers = [torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros((), dtype=torch.int64)]
    with torch.inference_mode():
        constant = torch.zeros(2)
    frozen = nn.Parameter(torch.zeros(2))
    world, all_of_them = Rank1(), [*weights, *numbers, constant, frozen]
    broadcast_all(all_of_them, world)
    assert world.sent == [1 << 19, 2, 6 + 1 + 0, 6 + 2, 2, 1], "long ones and constants alone, others by dtype"
    assert all(bool((tensor == 1).all()) for tensor in all_of_them)
    alone = Rank1()
    alone.size = 1
    broadcast_all(weights, alone)
    assert alone.sent == []


def test_a_digest_is_that_of_all_bits() -> None:
    weights = [torch.zeros(()), torch.arange(6.0).bfloat16().view(2, 3).t(), torch.ones(2, dtype=torch.complex64)]
    assert digest(weights) == digest([weight.clone() for weight in weights]) < 2**52
    for index in range(len(weights)):
        others = [weight.clone() for weight in weights]
        others[index][(0,) * others[index].dim()] = 5
        assert digest(others) != digest(weights)
