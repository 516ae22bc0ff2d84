import pytest
import torch

from unisono.errors import UsageError
from unisono.reducer.scattered_gradient import ScatteredGradient, clear, scatter


def test_whatever_reads_it_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = ScatteredGradient(parameter)
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: 2 * model.weight.grad,
        lambda: model(torch.ones(1, 3)).sum().backward(),
        lambda: torch.optim.SGD(model.parameters(), 0.1).step(),
    ):
        with pytest.raises(UsageError, match=r"needs a gradient that Sharded has summed in shards.*Sharded\(clip"):
            read()


def test_it_is_cleared_and_printed() -> None:
    model = torch.nn.Linear(3, 2)
    model.weight.grad = ScatteredGradient(model.weight)
    assert repr(model.weight.grad) == "ScatteredGradient((2, 3))"
    assert model.weight.grad.data_ptr() == 0
    model.zero_grad()
    assert model.weight.grad is None


def test_placeholders_mark_the_gradients_that_there_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 1)]
    parameters[1].grad = torch.ones(2)
    scatter(parameters, lambda number: number != 1)
    assert [type(one.grad) for one in parameters] == [ScatteredGradient, type(None), ScatteredGradient]
    parameters[2].grad = torch.ones(1)
    clear(parameters)
    assert [type(one.grad) for one in parameters] == [type(None), type(None), torch.Tensor]
