from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.reducer.structure import Structure


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)), nn.BatchNorm1d(2, affine=False))


def test_an_unchanged_model() -> None:
    model = make()
    model[0].weight.requires_grad_(False)
    structure = Structure(model)
    assert structure.names == ["0.bias", "1.0.weight"]
    assert structure.added(model) is None
    assert not structure.differs(model)


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
        structure.check_pass(None)


def test_weights_that_functional_call_lends_are_no_parameters() -> None:
    model = make()
    structure = Structure(model)
    lent = {name: 2 * parameter for name, parameter in model.named_parameters()}
    found: list[str | None] = []
    model.register_forward_pre_hook(lambda *_: found.append(structure.added(model)))
    torch.func.functional_call(model, lent, (torch.zeros(3, 2),))
    reference = weakref.ref(lent.pop("0.weight"))
    assert found == [None]
    assert reference() is None
    assert structure.added(model) is None
