import pytest
import torch

from unisono.errors import UsageError
from unisono.reducer.scattered_gradient import ScatteredGradient, clear, scatter


def linear() -> torch.nn.Linear:
    """Layer whose gradients are in shards."""
    model = torch.nn.Linear(3, 2)
    scatter(list(model.parameters()), ["weight", "bias"], lambda _: True)
    return model


def test_whatever_reads_it_is_refused() -> None:
    model = linear()
    assert model.weight.grad is not None
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: 2 * model.weight.grad,
        lambda: model.weight.grad.add_(model.weight),
        lambda: 2 * model.weight.grad.data,
        lambda: setattr(model.weight.grad, "data", torch.ones(2, 3)),
        model.weight.grad.untyped_storage,
        model.half,
        lambda: torch.optim.SGD(model.parameters(), 0.1).step(),
    ):
        with pytest.raises(UsageError, match=r"the gradient of parameter weight, which Sharded .*Sharded\(clip"):
            read()
    model.to(torch.float32)
    model.share_memory()
    assert isinstance(model.weight.grad, ScatteredGradient)


def test_it_is_cleared_and_printed() -> None:
    model = linear()
    assert repr(model.weight.grad) == "ScatteredGradient((2, 3))"
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == 0
    model.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("foreach", [False, True])
def test_zeros_take_its_place(foreach: bool) -> None:
    model = linear()
    torch.optim.Adam(model.parameters(), foreach=foreach).zero_grad(set_to_none=False)
    for parameter in model.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.eq(0).all()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1).all()


def test_a_backward_pass_adds_to_it_and_makes_it_stale() -> None:
    model = linear()
    placeholder = model.weight.grad
    assert isinstance(placeholder, ScatteredGradient)
    assert not placeholder.stale
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is placeholder
    assert placeholder.stale
    added = placeholder.take_added()
    assert added is not None
    assert added.eq(2).all()
    assert placeholder.take_added() is None


def test_placeholders_mark_the_gradients_that_there_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 1)]
    parameters[1].grad = torch.ones(2)
    scatter(parameters, "abc", lambda number: number != 1)
    assert [type(one.grad) for one in parameters] == [ScatteredGradient, type(None), ScatteredGradient]
    first = parameters[0].grad
    scatter(parameters, "abc", lambda number: number == 1)
    assert parameters[0].grad is first
    assert isinstance(parameters[1].grad, ScatteredGradient)
    parameters[2].grad = torch.ones(1)
    clear(parameters)
    assert [type(one.grad) for one in parameters] == [type(None), type(None), torch.Tensor]
