"""DistributedOptimizer: parallel equals serial, passes that accumulate, clipping, ranks without batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono.horovod as hvd
from unisono.errors import MismatchError, UsageError


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(net: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return net(inputs).square().mean()


def optimizer_of(net: torch.nn.Module, **options: Any) -> Any:
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(own, named_parameters=net.named_parameters(), **options)


def serial(steps: int, passes: int = 1, clip: float | None = None, ranks: int | None = None) -> torch.nn.Module:
    """A model that sees the batches of all ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ranks = ranks or hvd.size()
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(step * passes, (step + 1) * passes):
            (sum(loss(net, batch(index, rank)) for rank in range(ranks)) / ranks).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def same(net: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(actual, expected, rtol=1e-12, atol=1e-14) for actual, expected in pairs)


def test_gradients_that_are_set_behind_the_average_are_refused() -> None:
    net = model()
    optimizer = optimizer_of(net)
    loss(net[0], batch(0, hvd.rank())).backward()
    for parameter in net[2].parameters():
        parameter.grad = torch.ones_like(parameter)
    if hvd.size() > 1:
        with pytest.raises(UsageError, match=r"gradients were set after backward\(\), whose average lacks them"):
            optimizer.step()


def test_parallel_equals_serial() -> None:
    net = model()
    optimizer = optimizer_of(net)
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for step in range(5):
        optimizer.zero_grad()
        loss(net, batch(step, hvd.rank())).backward()
        optimizer.step()
        schedule.step()
    assert same(net, serial(5))


def test_gradients_of_several_passes_are_averaged_in_the_last() -> None:
    net = model()
    optimizer = optimizer_of(net, backward_passes_per_step=3)
    for step in range(3):
        optimizer.zero_grad()
        for index in range(3 * step, 3 * step + 3):
            loss(net, batch(index, hvd.rank())).backward()
        optimizer.step()
    assert same(net, serial(3, passes=3))
    for _ in range(3):
        loss(net, batch(0, hvd.rank())).backward()
    with pytest.raises(UsageError, match="backward_passes_per_step is 3"):
        loss(net, batch(0, hvd.rank())).backward()
    optimizer.synchronize()


def test_a_program_clips_between_synchronize_and_step() -> None:
    net = model()
    optimizer = optimizer_of(net)
    for step in range(4):
        optimizer.zero_grad()
        loss(net, batch(step, hvd.rank())).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert same(net, serial(4, clip=0.05))


def test_a_closure_averages_gradients_and_loss() -> None:
    net, passes = model(), 2
    optimizer = optimizer_of(net, backward_passes_per_step=passes)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            for index in range(passes * step, passes * step + passes):
                value = loss(net, batch(index, hvd.rank()))
                value.backward()
            return value

        last = optimizer.step(closure)
    assert same(net, serial(3, passes=passes))
    assert len(set(hvd.allgather_object(last.item()))) == 1


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.Tensor.item])
def test_lbfgs_takes_the_same_steps_on_all_ranks(kind: Callable[[torch.Tensor], Any]) -> None:
    net = model()
    own = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe", max_iter=4)
    optimizer = hvd.DistributedOptimizer(own)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(net, batch(0, hvd.rank()))
        value.backward()
        return kind(value)

    for _ in range(2):
        last = optimizer.step(closure)
        assert len(set(hvd.allgather_object(float(last)))) == 1
    assert len(set(hvd.allgather_object(tuple(net[0].weight.flatten().tolist())))) == 1
    assert optimizer_of(model()).step(lambda: None) is None
    with pytest.raises(UsageError, match="a closure returned a str"):
        optimizer.step(lambda: "loss")


def test_a_step_that_a_scaler_skips_is_followed_by_others() -> None:
    net = model()
    optimizer = optimizer_of(net, backward_passes_per_step=2)
    for step in range(3):
        for index in (2 * step, 2 * step + 1):
            loss(net, batch(index, hvd.rank())).backward()
        optimizer.synchronize()
        if step != 1:  # a gradient was infinite
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
    expected = model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2):
        plain.zero_grad()
        for index in (2 * step, 2 * step + 1):
            (sum(loss(expected, batch(index, rank)) for rank in range(hvd.size())) / hvd.size()).backward()
        plain.step()
    assert same(net, expected)
    loss(net, batch(0, hvd.rank())).backward()
    with pytest.raises(UsageError, match=r"call optimizer\.synchronize\(\)"), optimizer.skip_synchronize():
        optimizer.step()


def test_a_second_optimizer_of_the_same_parameters_takes_over() -> None:
    net = model()
    optimizer_of(net)
    second = optimizer_of(net)
    for step in range(2):
        second.zero_grad()
        loss(net, batch(step, hvd.rank())).backward()
        second.step()
    assert same(net, serial(2))
    with pytest.raises(UsageError, match="give each parameter to one"):
        hvd.DistributedOptimizer(torch.optim.SGD(net[0].parameters(), lr=0.1))


def test_parameters_that_nothing_would_average_are_refused() -> None:
    net, more = model(), torch.nn.Linear(2, 2)
    optimizer = optimizer_of(net)
    optimizer.add_param_group({"params": more.parameters()})
    loss(net, batch(0, hvd.rank())).backward()
    with pytest.raises(UsageError, match="added to the optimizer"):
        optimizer.step()
    with pytest.raises(UsageError, match="lacks 2 parameters"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([*net.parameters(), *more.parameters()], lr=0.1), net.named_parameters()
        )


def test_a_parameter_that_is_unfrozen_is_refused_until_the_optimizer_is_made_again() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = optimizer_of(net)
    net[0].requires_grad_(True)
    for _ in range(3):
        optimizer.zero_grad()
        with pytest.raises(
            UsageError, match=r"0\.weight was .* unfrozen .* make the DistributedOptimizer again, on all"
        ):
            loss(net, batch(0, hvd.rank())).backward()
    optimizer = optimizer_of(net)
    optimizer.zero_grad()
    loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    assert same(net, serial(1))


def test_names_of_modules_are_free() -> None:
    net = torch.nn.Module()
    net.type, net.half = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    sum(layer(torch.full((1, 2), float(hvd.rank()))).sum() for layer in net.children()).backward()
    mean = (hvd.size() - 1) / 2
    assert all(layer.weight.grad is not None and layer.weight.grad.eq(mean).all() for layer in net.children())
    optimizer.step()


def test_after_shutdown_a_step_says_what_to_do() -> None:
    net = model()
    optimizer = optimizer_of(net)
    hvd.shutdown()
    loss(net, batch(0, 0)).backward()
    with pytest.raises(UsageError, match=r"hvd\.shutdown\(\) was called"):
        optimizer.step()
    hvd.init()


def test_join_drops_what_was_not_applied_and_outlasts_steps_without_batches() -> None:
    net = model()
    optimizer = optimizer_of(net, backward_passes_per_step=2)
    last = hvd.rank() == hvd.size() - 1
    loss(net, batch(0, hvd.rank())).backward()
    loss(net, batch(1, hvd.rank())).backward()
    optimizer.step()
    if last:
        optimizer.step()  # no batch: the others have joined, or are about to
        for index in (2, 3):
            loss(net, batch(index, hvd.rank())).backward()
        optimizer.step()
    else:
        (1e6 * loss(net, batch(9, hvd.rank()))).backward()  # half of a step
    hvd.join()
    weights = hvd.allgather_object(tuple(net[0].weight.flatten().tolist()))
    assert len(set(weights)) == 1
    assert max(map(abs, weights[0])) < 100


def test_tensors_without_names_are_broadcast() -> None:
    tensors = [torch.full((2, 2), float(hvd.rank())), torch.full((3,), float(hvd.rank()))]
    hvd.broadcast_parameters(tensors, root_rank=hvd.size() - 1)
    assert all(tensor.eq(hvd.size() - 1).all() for tensor in tensors)
    with pytest.raises(UsageError, match="takes tensors"):
        hvd.broadcast_parameters(["weight"])


@pytest.mark.parametrize("kind", [dict, list])
def test_names_are_matched_whatever_their_order(kind: Callable[[Any], Any]) -> None:
    named = [(name, torch.full((2,), float(index + 10 * hvd.rank()))) for index, name in enumerate("abc")]
    hvd.broadcast_parameters(kind(reversed(named) if hvd.rank() else named))
    assert [tensor[0].item() for _, tensor in named] == [0, 1, 2]
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match=r"broadcast of '[ab]'"):
            hvd.broadcast_parameters(dict([named[hvd.rank() % 2]]))


def test_a_step_before_the_last_pass_averages_what_there_is() -> None:
    net = model()
    optimizer = optimizer_of(net, backward_passes_per_step=4)
    loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    assert same(net, serial(1))


def test_a_rank_without_a_batch_has_no_weight() -> None:
    net = model()
    optimizer = optimizer_of(net)
    last = hvd.size() - 1
    if hvd.rank() < last or not last:
        loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    assert same(net, serial(1, ranks=max(last, 1)))


def test_ranks_that_have_joined_get_the_weights_of_the_last() -> None:
    net = model()
    optimizer = optimizer_of(net)
    for step in range(2 + hvd.rank()):
        optimizer.zero_grad()
        loss(net, batch(step, hvd.rank())).backward()
        optimizer.step()
    assert hvd.join() == hvd.size() - 1
    assert len(set(hvd.allgather_object(tuple(net[0].weight.flatten().tolist())))) == 1
    momentum = optimizer.state[net[0].weight]["momentum_buffer"]
    assert len(set(hvd.allgather_object(tuple(momentum.flatten().tolist())))) == 1
    optimizer.zero_grad()
    loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(tuple(net[0].weight.flatten().tolist())))) == 1


def test_weights_and_optimizer_state_of_one_rank_for_all() -> None:
    net = model()
    with torch.no_grad():
        net[0].weight.fill_(float(hvd.rank()))
    adam = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        loss(net, batch(0, 0)).backward()
        adam.step()
    expected = copy.deepcopy(adam.state_dict()) if hvd.rank() == 0 else None
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert len(set(hvd.allgather_object(tuple(net[0].weight.flatten().tolist())))) == 1
    expected = hvd.broadcast_object(expected)
    state = adam.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in entry.items())


def test_a_copy_is_the_optimizer_as_it_was_before() -> None:
    net = model()
    optimizer = optimizer_of(net)
    loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    own_net, own = copy.deepcopy((net, optimizer))
    assert type(own) is type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    assert own.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    own.zero_grad()
    loss(own_net, batch(1, 0) * (hvd.rank() + 1)).backward()
    own.step()
    assert len(set(hvd.allgather_object(tuple(own_net[0].weight.flatten().tolist())))) == hvd.size()
    optimizer.zero_grad()


def test_fp16_compression_trains() -> None:
    net = model()
    optimizer = optimizer_of(net, compression=hvd.Compression.fp16)
    loss(net, batch(0, hvd.rank())).backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(tuple(net[0].weight.flatten().tolist())))) == 1


def test_what_there_is_not() -> None:
    with pytest.raises(UsageError, match="multiply the loss"):
        optimizer_of(model(), op=hvd.Sum)
    with pytest.raises(UsageError, match="at least 1 backward"):
        optimizer_of(model(), backward_passes_per_step=0)
    with pytest.raises(UsageError, match="sparse=False"):
        optimizer_of(model(), sparse_as_dense=True)
    optimizer_of(model(), sparse_as_dense=False)
