"""Hooks of a model: gradients that are complete, and parameters that are waited for when they are read."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from unisono.engine import weakly
from unisono.errors import UsageError
from unisono.reducer.hooks import LIVING, WaitOnAccess, check_kept, register_hooks, wait_on_access


class Record:
    """Receiver of complete gradients."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.parameters: list[nn.Parameter] = []

    def mark_ready(self, index: int, last: bool) -> None:
        self.calls.append((index, last))


def test_each_complete_gradient_is_reported_once() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    handles = register_hooks(list(model.parameters()), record.mark_ready)
    (model(torch.ones(1, 2)).sum() + model(torch.zeros(1, 2)).sum()).backward()
    assert sorted(record.calls) == [(0, True), (1, True)]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(record.calls) == 2


def test_hooks_of_the_program_that_follow_are_seen() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    register_hooks(list(model.parameters()), record.mark_ready)
    model.bias.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(record.calls) == [(0, True), (1, False)]


def test_they_do_not_keep_the_receiver_alive() -> None:
    model, record = torch.nn.Linear(2, 2), Record()
    register_hooks(list(model.parameters()), record.mark_ready)
    reference = weakref.ref(record)
    gc.disable()
    try:
        del record
        assert reference() is None
    finally:
        gc.enable()


def test_parameters_of_a_model_that_is_gone_are_not_trained_alone() -> None:
    """Unless they are in another parallel model."""
    body, owner = torch.nn.Linear(2, 2), Record()
    optimizer = torch.optim.SGD(body.parameters(), 0.1)
    register_hooks(list(body.parameters()), owner.mark_ready)
    refuse = weakly(owner.mark_ready, check_kept)
    del owner
    with pytest.raises(UsageError, match=r"the parallel model is gone, .* keep what unisono\.parallel returns"):
        body(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="the parallel model is gone"):
        refuse(optimizer)
    copy.deepcopy(body)(torch.ones(1, 2)).sum().backward()
    other = Record()
    other.parameters = list(body.parameters())
    LIVING.add(other)
    body(torch.ones(1, 2)).sum().backward()
    refuse(optimizer)


class Late:
    """Model parameters that get their values when they are waited for."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {id(parameter): parameter.detach().clone() for parameter in model.parameters()}
        self.parameters = list(model.parameters())
        self.late: set[int] = set()
        self.buffers = 0
        """How often a buffer was read or set."""
        self.needed: list[nn.Parameter] = []
        self.awaits = wait_on_access(model, self.need, self.need_buffer)
        self.spoil()

    def spoil(self) -> None:
        self.needed.clear()
        self.late = set(self.values)
        for parameter in self.parameters:
            parameter.data.fill_(float("nan"))

    def need_buffer(self, _: torch.Tensor | None) -> None:
        self.buffers += 1

    def need(self, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.needed.append(parameter)
        if id(parameter) in self.late:
            self.late.remove(id(parameter))
            parameter.data.copy_(self.values[id(parameter)])

    def seen(self, *parameters: nn.Parameter) -> bool:
        """Whether just these were needed."""
        return {id(parameter) for parameter in self.needed} == {id(parameter) for parameter in parameters}


class Tied(nn.Module):
    """An embedding whose weight is tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.back = nn.Linear(4, 5, bias=False)
        self.back.weight = self.words.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.back(self.words(inputs.argmax(-1)))


class Attends(nn.Module):
    """Its attention reads the parameters of a module of its own, `out_proj`, without calling that."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(inputs, inputs, inputs)[0]


class Lists(nn.Module):
    """Parameters of its own, in a list, in a dict and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.listed = nn.ParameterList([torch.rand(4), torch.rand(4)])
        self.named = nn.ParameterDict({"shift": torch.rand(4)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale * self.listed[0] * sum(self.listed) + self.named["shift"]


class Keeps(nn.Module):
    """Its parameters are in a list of its own as well, and that is what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.kept = [self.scale, self.shift]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.kept[0] + self.kept[1]


class Recurrent(nn.Module):
    """An LSTM has such a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.lstm(inputs)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.PReLU()),
    "tied": Tied,
    "attention": Attends,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "lists": Lists,
    "keeps": Keeps,
    "recurrent": Recurrent,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
    "cell": lambda: nn.GRUCell(4, 3),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_waits_for_the_parameters_that_it_reads(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    inputs = torch.rand(4) if name == "cell" else torch.rand(2, 3, 4)
    with torch.set_grad_enabled(training):
        expected = copy.deepcopy(model)(inputs)
        late = Late(model)
        assert late.awaits
        for _ in range(2):
            late.spoil()
            assert torch.equal(model(inputs), expected)
            assert late.seen(*model.parameters())


def test_reading_one_parameter_waits_for_that_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    late = Late(model)
    assert model[0].weight is late.parameters[0]
    assert late.seen(late.parameters[0])
    late.spoil()
    assert model[1]._parameters["bias"] is model[1]._parameters.get("bias")
    assert late.seen(late.parameters[3])


def test_a_module_waits_for_its_own_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    late = Late(model)
    assert not model[0](torch.rand(1, 2)).isnan().any()
    assert late.seen(*late.parameters[:2])


def test_missing_parameters_behave_as_in_pytorch() -> None:
    model = nn.Linear(2, 2, bias=False)
    Late(model)
    assert model.bias is None
    assert model._parameters.get("more") is None
    assert model._parameters.get("more", 3) == 3
    assert not hasattr(model, "more")
    with pytest.raises(KeyError):
        model._parameters["more"]


@pytest.mark.parametrize(
    "read",
    [
        lambda model: list(model.state_dict().values()),
        lambda model: list(model.parameters()),
        lambda model: [parameter for _, parameter in model.named_parameters()],
        lambda model: list(copy.deepcopy(model).parameters()),
        lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
        lambda model: list(copy.deepcopy(model.double()).parameters()),
    ],
    ids=["state_dict", "parameters", "named_parameters", "deepcopy", "pickle", "double"],
)
def test_reading_all_parameters_waits_for_all(read: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    model = Tied()
    late = Late(model)
    assert all(not tensor.isnan().any() for tensor in read(model))
    assert late.seen(*late.parameters)


def test_parameters_can_be_loaded_and_set() -> None:
    model, other, anew = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
    late = Late(model)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
    model.weight = anew
    assert model.weight is anew
    assert late.needed[-1] is anew
    del model.bias
    assert not hasattr(model, "bias")


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_a_copy_does_not_wait(copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    inputs = torch.rand(2, 3, 4)
    expected = model(inputs)
    late = Late(model)
    duplicate = copied(model)
    assert all(isinstance(module._parameters, WaitOnAccess) == bool(module._parameters) for module in model.modules())
    assert all(type(module._parameters) is dict for module in duplicate.modules())
    late.spoil()
    assert torch.equal(duplicate(inputs), expected)
    assert late.needed == []
    assert torch.equal(model(inputs), expected)


def test_a_copy_keeps_tied_parameters() -> None:
    model = Tied()
    Late(model)
    duplicate = copy.deepcopy(model)
    assert duplicate.words.weight is duplicate.back.weight
    assert duplicate.words.weight is not model.words.weight


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "left",
    [
        torch.jit.script,
        lambda layer: nn.Sequential(layer, torch.jit.script(nn.Linear(2, 2))),
        lambda layer: torch.jit.trace(layer, torch.ones(1, 2)),
        lambda layer: torch.compile(layer, backend="eager"),
    ],
    ids=["script", "a part", "trace", "compile"],
)
def test_a_scripted_or_compiled_model_is_unchanged(left: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Linear(2, 2)
    model, needed = left(layer), []
    assert wait_on_access(model, needed.append, needed.append) is False
    assert type(layer._parameters) is dict
    model(torch.ones(1, 2))
    assert needed == []


def test_a_model_without_parameters() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    assert wait_on_access(model, *[lambda _: pytest.fail("nothing is needed")] * 2) is True
    assert model(torch.ones(1, 2)).tolist() == [[1, 1]]


def test_reading_or_setting_a_buffer_waits() -> None:
    model = nn.BatchNorm1d(2, affine=False)
    late = Late(model)
    assert late.awaits
    for use in (
        lambda: model(torch.ones(3, 2)),
        lambda: model.running_mean,
        lambda: setattr(model, "running_mean", torch.ones(2)),
        model.state_dict,
        lambda: list(model.buffers()),
    ):
        late.buffers = 0
        use()
        assert late.buffers > 0
    assert torch.equal(model.running_mean, torch.ones(2))
