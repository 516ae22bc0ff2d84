"""Plays that are kept for tensors: the compiled table beside the one in Python."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from unisono.collectives.ready import Ready, ReadyInPython

MAKERS: list[Callable[[int], ReadyInPython]] = [ReadyInPython, *([Ready] if Ready is not ReadyInPython else [])]


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], ReadyInPython]:
    return request.param  # type: ignore[no-any-return]


def test_a_play_is_found_by_parameters_and_memory(make: Callable[[int], ReadyInPython]) -> None:
    ready, played = make(10), list[str]()
    tensor, other = torch.zeros(4), torch.zeros(4)
    ready.add(("sum", None), lambda: played.append("sum"), tensor)
    ready.add(("pair", None), lambda: played.append("pair"), tensor, other)
    assert ready.play(("sum", None), tensor)
    assert ready.play(("sum", None), tensor.view(2, 2))  # the same memory
    assert ready.play(("pair", None), tensor, other)
    assert played == ["sum", "sum", "pair"]
    for parameters, tensors in [
        (("sum", "wire"), [tensor]),
        (("sum", None), [other]),
        (("sum", None), [tensor[:3]]),
        (("sum", None), [tensor.view(torch.int32)]),
        (("sum", None), [tensor, other]),
        (("pair", None), [other, tensor]),
        (("sum", None), [tensor.view(2, 2).t()]),
        (("sum", None), [torch._neg_view(tensor)]),  # type: ignore[attr-defined]
        (("sum", None), [torch.eye(2).to_sparse()]),
        (("sum", None), [torch.zeros(4, device="meta")]),
    ]:
        assert not ready.play(parameters, *tensors), (parameters, tensors)
    assert len(played) == 3


def test_a_tensor_that_changes_is_another(make: Callable[[int], ReadyInPython]) -> None:
    ready, played = make(10), list[int]()
    tensor = torch.zeros(4, 4)
    ready.add(("sum",), lambda: played.append(1), tensor)
    tensor.t_()
    assert not ready.play(("sum",), tensor)
    tensor.t_()
    assert ready.play(("sum",), tensor)
    tensor.resize_(2)
    assert not ready.play(("sum",), tensor)
    tensor.data = torch.zeros(4, 4)
    assert not ready.play(("sum",), tensor)
    assert played == [1]


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, lambda data: data.view(torch.int32)),
        (torch.float32, torch._neg_view),  # type: ignore[attr-defined]
        (torch.complex64, torch.conj),
    ],
)
def test_a_tensor_that_is_given_other_data_in_its_memory_is_another(
    make: Callable[[int], ReadyInPython], dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    ready, tensor = make(10), torch.zeros(4, dtype=dtype)
    ready.add(("sum",), lambda: None, tensor)
    assert ready.play(("sum",), tensor)
    before, tensor.data = tensor.data, change(tensor.data)
    assert not ready.play(("sum",), tensor)
    tensor.data = before
    assert ready.play(("sum",), tensor)


def test_conjugates_are_not_kept(make: Callable[[int], ReadyInPython]) -> None:
    ready, tensor = make(10), torch.zeros(4, dtype=torch.complex64)
    ready.add(("sum",), lambda: None, tensor)
    assert ready.play(("sum",), tensor)
    assert not ready.play(("sum",), tensor.conj())


def test_of_too_many_the_others_are_dropped(make: Callable[[int], ReadyInPython]) -> None:
    ready, memory = make(3), torch.zeros(10)
    for place in range(10):
        ready.add(("sum",), lambda: None, memory[place : place + 1])
        assert len(ready) <= 3
    assert ready.play(("sum",), memory[9:])
    assert not ready.play(("sum",), memory[:1])
    ready.clear()
    assert not len(ready)
    assert not ready.play(("sum",), memory[9:])


def test_no_tensor_is_kept_alive_and_errors_pass(make: Callable[[int], ReadyInPython]) -> None:
    ready, tensor = make(3), torch.zeros(3)

    def fail() -> None:
        raise KeyboardInterrupt

    ready.add(("sum",), fail, tensor)
    for turn in (tensor, tensor.view(3)):
        with pytest.raises(KeyboardInterrupt):
            ready.play(("sum",), turn)
    gone = weakref.ref(tensor)
    del tensor, turn
    gc.collect()
    assert gone() is None


def test_a_table_in_a_circle_is_collected(make: Callable[[int], ReadyInPython]) -> None:
    class Owner:
        def play(self) -> None: ...

    owner, tensor = Owner(), torch.zeros(1)
    owner.ready = make(3)  # type: ignore[attr-defined]
    owner.ready.add(("sum",), owner.play, tensor)  # type: ignore[attr-defined]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
