"""A trace has each module's own calls and sizes, and leaves the model as it was."""

from __future__ import annotations

import random
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.tensor_parallel.trace import REPETITIONS, samples_of, trace_forward


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(6, 3))


def test_modules_are_listed_as_they_are_called() -> None:
    found = trace_forward(network(), torch.zeros(5, 4), nullcontext)
    assert list(found) == ["", "0", "1", "2", "3", "4"]
    assert [one.calls for one in found.values()] == [[1] * (1 + REPETITIONS)] * 6
    assert all(one.once for one in found.values())
    assert [one.backward for one in found.values()] == [False, False, True, True, True, True]
    first = found["0"]
    assert first.inputs is not None
    assert first.outputs is not None
    assert (first.inputs.shape, first.outputs.shape, first.outputs.device.type) == ((5, 4), (5, 6), "meta")
    assert all(len(one.seconds) == 1 + REPETITIONS and min(one.seconds) > 0 for one in found.values())


def test_a_module_that_is_called_twice_has_both_calls() -> None:
    relu = nn.ReLU()
    found = trace_forward(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu), torch.zeros(2, 4), nullcontext)
    assert found["1"].calls == [2] * (1 + REPETITIONS)
    assert not found["1"].once
    assert "3" not in found


def test_a_module_that_some_passes_leave_out_is_not_called_once() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late, self.passes = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return self.late(x) if self.passes > REPETITIONS else self.always(x)

    found = trace_forward(Skipping(), torch.zeros(2, 4), nullcontext)
    assert (found["late"].calls, found["late"].median) == ([0] * REPETITIONS + [1], 0.0)
    assert not found["always"].once
    assert not found["late"].once


def test_a_call_that_fails_ends_where_the_model_goes_on() -> None:
    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4))
            self.other = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return torch.as_tensor(self.inner(x))
            except RuntimeError:
                return torch.as_tensor(self.other(x))

    found = trace_forward(Trying(), torch.zeros(2, 4), nullcontext)
    assert list(found) == ["", "inner", "inner.0", "other"]
    assert (found["inner"].outputs, found["inner"].median, found["inner.0"].outputs) == (None, 0.0, None)
    assert found["other"].once
    assert all(found[name].median > 0 for name in ("", "other"))


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = network()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_forward(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), nullcontext)
    assert torch.equal(state, torch.get_rng_state())
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())
    assert all(one.grad is None for one in model.parameters())


def test_buffers_that_are_assigned_attributes_and_generators_stay_as_they_were() -> None:
    class Changing(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.calls, self.seen = 0, list[float]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.calls += 1
            self.seen.append(random.random() + np.random.rand())
            return x * torch.rand(4)

    model, python, numpy, pytorch = Changing(), random.getstate(), np.random.get_state(), torch.get_rng_state()
    mean = model.mean
    trace_forward(model, torch.ones(2, 4), nullcontext)
    assert model.mean is mean
    assert (mean.tolist(), model.calls, model.seen) == ([0.0] * 4, 0, [])
    assert random.getstate() == python
    assert str(np.random.get_state()) == str(numpy)
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_the_copy_is_freed() -> None:
    copies: list[weakref.ref[nn.Module]] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copies.append(weakref.ref(self))
            return super().forward(x)

    model = nn.Sequential(Noting(4, 4))
    found = trace_forward(model, torch.zeros(2, 4), nullcontext)
    assert len(copies) == 1 + REPETITIONS
    assert all(copy() is None for copy in copies)
    assert found["0"].once


def test_a_model_that_cannot_be_copied_needs_a_plan_by_hand() -> None:
    locked = network()
    locked.lock = threading.Lock()
    computed = network()
    computed.scale = computed[0].weight * 2
    for model in (locked, computed):
        with pytest.raises(UsageError, match=r"^Sequential cannot be copied, .*name the layers in a plan") as caught:
            trace_forward(model, torch.zeros(5, 4), nullcontext)
        assert "\n" not in str(caught.value)


def test_the_model_has_no_hooks_where_a_pass_fails() -> None:
    model = network()
    with pytest.raises(RuntimeError):
        trace_forward(model, torch.zeros(5, 7), nullcontext)
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())


def test_several_arguments_are_a_tuple() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    example = torch.zeros(3, 2), torch.zeros(3, 2)
    assert samples_of(example) == samples_of(example[0]) == 3
    assert list(trace_forward(Sum(), example, nullcontext)) == [""]


def test_a_trace_has_as_many_passes_as_it_is_asked_for() -> None:
    found = trace_forward(network(), torch.zeros(5, 4), nullcontext, repetitions=1)
    assert all(one.calls == [1, 1] and len(one.seconds) == 2 and one.once for one in found.values())
