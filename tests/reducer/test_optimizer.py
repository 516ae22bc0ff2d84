"""A split step equals the whole step, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.errors import UsageError
from unisono.optimizers.layerwise import LAMB, LARS
from unisono.optimizers.sharded import StepCheck
from unisono.reducer.control import ControlMessage
from unisono.reducer.optimizer import SplitStep, wait_on_use
from unisono.reducer.replica import ModelReplica
from unisono.reducer.structure import Structure
from unisono.step.build import updates
from unisono.step.layout import Bucket, Layout, Updates
from unisono.step.overlaps import OVERLAPS, CollectiveTasks

Given = Sequence[torch.Tensor | None]

SHAPES = ((3, 4), (5,), (2, 2, 3), (1,), ())

MAKERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1),
    "Nesterov": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=True),
    "Adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, foreach=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "LARS": lambda groups: LARS(groups, weight_decay=0.1),
    "LAMB": lambda groups: LAMB(groups, weight_decay=0.1),
}


class Own(torch.optim.SGD):
    """An optimizer that is not PyTorch's own: it may look at all parameters at once."""


class Engine:
    """The tasks of the optimizer's step, which are carried out at once, or when somebody waits for them: of a program
    in which `parts` are the parameters of which nothing is missing after each bucket."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], parts: Sequence[Sequence[int]], clip: float | None, at_once: bool
    ) -> None:
        self.parameters = parameters
        self.pushed: list[tuple[str, int, list[int]]] = []
        self._parts, self._clip, self._at_once = parts, clip, at_once
        self._waiting: list[Callable[[], object]] = []

    def begin(self, step: SplitStep) -> Callable[[int], None]:
        """Give all parameters no gradient; return what carries the tasks of a key out."""
        for parameter in self.parameters:
            parameter.grad = None
        buckets = [Bucket(1, tuple(numbers)) for numbers in self._parts]
        layout = Layout(1, len(self.parameters), tuple(buckets), updates=step.updates, clip=self._clip)
        programs: Any = MagicMock()
        programs.memory.parameters = self.parameters
        begun = ModelReplica(programs, layout, ControlMessage(1.0), step.update)

        def settled(key: int) -> None:
            for task in updates(layout, key, CollectiveTasks(layout, OVERLAPS["chain"], 1)):
                self.pushed.append((task.operation.name, key, list(task.parameters)))
                self._waiting.append(partial(task.operation.act, begun, task, None))  # type: ignore[arg-type]
                if self._at_once:
                    self.update()

        return settled

    def wait(self) -> None:
        self.update()

    def update(self) -> None:
        """Carry out what was pushed, in its order."""
        while self._waiting:
            with torch.no_grad():
                self._waiting.pop(0)()


def structure_of(parameters: list[torch.nn.Parameter]) -> Structure:
    return Structure(torch.nn.ParameterList(parameters))


class Pair:
    """One model twice: updated in parts, and by a plain step."""

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        parts: Sequence[Sequence[int]] = ((4, 3), (), (2,), (1, 0)),
        clip: float | None = None,
        at_once: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        plain = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        mine = deepcopy(plain)
        self.plain, self.optimizer = make(_groups(plain)), make(_groups(mine))
        self.parameters, self.clip = plain, clip
        self.engine, self.parts = Engine(mine, parts, clip, at_once), parts
        wait_on_use(self.optimizer, self.engine.wait)

    def begin(self) -> SplitStep:
        return SplitStep(self.optimizer, structure_of(self.engine.parameters))

    def step(self, gradients: Given) -> None:
        step = self.begin()
        settled = self.engine.begin(step)
        for key, numbers in enumerate(self.parts, 1):
            for index in numbers:
                self.engine.parameters[index].grad = _copy(gradients[index])
            settled(key)
        if step.updates is Updates.WHOLE:
            self.engine.wait()
        self.step_plainly(gradients)

    def step_plainly(self, gradients: Given) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = _copy(gradient)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.plain.step()

    def check(self) -> None:
        """Weights, state and options are the same to the last bit."""
        for index, (mine, plain) in enumerate(zip(self.engine.parameters, self.parameters, strict=True)):
            assert torch.equal(mine, plain), f"parameter {index} of shape {SHAPES[index]}"
        same(self.optimizer.state_dict(), self.plain.state_dict())


def same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            same(actual[key], expected[key])
    elif isinstance(actual, list):
        assert len(actual) == len(expected)
        for mine, its in zip(actual, expected, strict=True):
            same(mine, its)
    else:
        assert actual == expected


def random_gradients(seed: int, missing: frozenset[int] = frozenset()) -> Given:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [None if index in missing else gradient for index, gradient in enumerate(drawn)]


def _groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with rates of their own, the second not of the last parameters alone."""
    return [
        {"params": [parameters[0], parameters[3]], "lr": 0.1},
        {"params": parameters[1:3] + parameters[4:], "lr": 0.01},
    ]


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """All parameters in some order, in some buckets, of which some complete nothing."""
    order = draw(st.permutations(range(len(SHAPES))))
    cuts = sorted(draw(st.lists(st.integers(0, len(SHAPES)), max_size=4)))
    return [order[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(SHAPES)], strict=True)]


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25)
@given(
    parts=partitions(),
    steps=st.lists(st.frozensets(st.integers(0, len(SHAPES) - 1), max_size=3), min_size=1, max_size=4),
    at_once=st.booleans(),
)
def test_split_steps_equal_whole_steps(
    name: str, parts: list[list[int]], steps: list[frozenset[int]], at_once: bool
) -> None:
    """Some gradients are missing in each step, and updates may come when all have been pushed."""
    pair = Pair(MAKERS[name], parts, at_once=at_once)
    for seed, missing in enumerate(steps):
        pair.step(random_gradients(seed, missing))
        pair.engine.update()
        pair.check()
    pushed = [("update", key, list(numbers)) for key, numbers in enumerate(parts, 1) if numbers]
    assert [(name, key, sorted(numbers)) for name, key, numbers in pair.engine.pushed] == [
        (name, key, sorted(numbers)) for name, key, numbers in pushed
    ] * len(steps)


def test_each_part_is_made_as_soon_as_possible() -> None:
    pair = Pair(MAKERS["SGD"])
    before = [parameter.detach().clone() for parameter in pair.engine.parameters]
    settled = pair.engine.begin(pair.begin())
    for parameter, gradient in zip(pair.engine.parameters[3:], random_gradients(0)[3:], strict=True):
        parameter.grad = gradient
    settled(1)
    stayed = [torch.equal(parameter, old) for parameter, old in zip(pair.engine.parameters, before, strict=True)]
    assert stayed == [True, True, True, False, False]


@pytest.mark.parametrize("make", [MAKERS["SGD"], Own])
def test_parameters_without_a_gradient_do_not_change(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Weight decay and momentum do not touch it, and it gets no state."""
    pair = Pair(make)
    before = [parameter.detach().clone() for parameter in pair.engine.parameters]
    pair.step(random_gradients(0, frozenset({1, 2})))
    stayed = [torch.equal(parameter, old) for parameter, old in zip(pair.engine.parameters, before, strict=True)]
    assert stayed == [False, True, True, False, False]
    assert not {pair.engine.parameters[index] for index in (1, 2)} & set(pair.optimizer.state)
    pair.step([None] * len(SHAPES))
    pair.check()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("make", [MAKERS["SGD"], MAKERS["AdamW"], Own])
def test_a_scheduler_sets_the_rate_of_each_step(make: Callable[..., torch.optim.Optimizer], at_once: bool) -> None:
    """Whether its step comes after the updates or before them."""
    pair = Pair(make, at_once=at_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the optimizer has made no step, or another one than the scheduler's
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (pair.optimizer, pair.plain)]
        for seed in range(4):
            pair.step(random_gradients(seed))
            for scheduler in schedulers:
                scheduler.step()
            pair.engine.update()
            pair.check()
    assert [group["lr"] for group in pair.optimizer.param_groups] == [0.1 / 16, 0.01 / 16]


@pytest.mark.parametrize("make", [MAKERS["SGD"], MAKERS["Adam"], Own])
def test_a_rate_that_changes_while_updates_are_under_way_is_the_next_steps(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    pair = Pair(make, at_once=False)
    for seed in range(3):
        pair.step(random_gradients(seed))
        for optimizer in (pair.optimizer, pair.plain):  # the plain step is over, the other has not begun
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        pair.engine.update()
        pair.check()


def test_a_rate_in_a_tensor_that_changes_is_the_next_steps_as_well() -> None:
    pair = Pair(
        lambda groups: torch.optim.Adam([{**group, "lr": torch.tensor(group["lr"])} for group in groups]), at_once=False
    )
    for seed in range(3):
        pair.step(random_gradients(seed))
        for optimizer in (pair.optimizer, pair.plain):
            for group in optimizer.param_groups:
                group["lr"].mul_(0.5)
        pair.engine.update()
        pair.check()


def whole(pair: Pair) -> bool:
    """Whether a step was one, of all parameters, at the last bucket; False where it was in parts."""
    pair.engine.pushed.clear()
    pair.step(random_gradients(1))
    pair.check()
    pushed = pair.engine.pushed
    if pushed == [("update", 4, list(range(len(SHAPES))))]:
        return True
    assert pushed == [("update", 1, [3, 4]), ("update", 3, [2]), ("update", 4, [0, 1])]
    return False


def test_a_custom_optimizer_makes_one_step() -> None:
    assert whole(Pair(Own))
    assert whole(Pair(type("Mine", (LARS,), {})))
    for known in (torch.optim.SGD, LARS, LAMB):
        assert not whole(Pair(known))


def test_lbfgs_is_refused_with_a_remedy() -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    with pytest.raises(UsageError, match=r"unisono.parallel and its step\(closure\)"):
        wait_on_use(torch.optim.LBFGS(parameters), lambda: None)


def test_entries_that_a_custom_optimizer_adds_to_its_groups_stay() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step()
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    pair = Pair(Counting)
    for _ in range(3):
        assert whole(pair)
    assert [group["count"] for group in pair.optimizer.param_groups] == [3, 3]


def test_hooks_of_all_optimizers_see_one_step_of_all() -> None:
    pair, seen = Pair(torch.optim.SGD), list[int]()
    hooked = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        assert whole(pair)
    finally:
        hooked.remove()
    assert seen == [1, 1], "once here, and once in the plain step beside it"


def test_parts_do_not_go_through_hooks_which_another_thread_may_change() -> None:
    pair, seen = Pair(torch.optim.SGD), list[int]()
    checked = register_optimizer_step_pre_hook(StepCheck(lambda *_: seen.append(1)))
    try:
        assert not whole(pair)
    finally:
        checked.remove()
    assert seen == [1], "in the plain step beside it"


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_see_one_step_of_all(register: str) -> None:
    pair, seen = Pair(torch.optim.SGD), list[list[int]]()

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append([len(group["params"]) for group in optimizer.param_groups])

    hooked = getattr(pair.optimizer, register)(hook)
    assert whole(pair)
    assert seen == [[2, 3]]
    hooked.remove()
    assert not whole(pair)
    assert seen == [[2, 3]]


def test_a_parameter_outside_the_model_is_refused() -> None:
    known, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([known, other], lr=1.0)
    with pytest.raises(UsageError, match=r"a parameter of shape \(3,\) that is not the model's"):
        SplitStep(optimizer, structure_of([known]))
    other.requires_grad_(requires_grad=False)
    assert SplitStep(optimizer, structure_of([known])).updates is Updates.PARTS


def test_zero_grad_and_state_dict_wait_for_pending_updates() -> None:
    pair = Pair(MAKERS["SGD"], at_once=False)
    pair.step(random_gradients(0))
    pair.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in pair.engine.parameters)
    pair.step(random_gradients(1))
    pair.optimizer.state_dict()
    pair.check()


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@settings(max_examples=25)
@given(
    parts=partitions(),
    clip=st.sampled_from((0.01, 1.0, 1e6)),
    missing=st.frozensets(st.integers(0, len(SHAPES) - 1)),
    at_once=st.booleans(),
)
def test_clipping_is_by_the_norm_of_all(
    name: str, parts: list[list[int]], clip: float, missing: frozenset[int], at_once: bool
) -> None:
    pair = Pair(MAKERS[name], parts, clip, at_once)
    for seed in range(3):
        pair.step(random_gradients(seed, missing))
        pair.engine.update()
        pair.check()
    everyone = list(range(len(SHAPES)))
    assert pair.engine.pushed == [("clip", len(parts), []), ("update", len(parts), everyone)] * 3


def test_a_custom_optimizer_is_clipped() -> None:
    pair = Pair(Own, clip=0.01)
    pair.step(random_gradients(0))
    pair.check()
    assert [name for name, *_ in pair.engine.pushed] == ["clip", "update"]


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumes_from_the_state_after_split_steps(name: str) -> None:
    """What a checkpoint keeps, another optimizer takes up."""
    first, second = Pair(MAKERS[name]), Pair(MAKERS[name], ((0,), (1, 2, 3), (4,)))
    for seed in range(2):
        first.step(random_gradients(seed))
    with torch.no_grad():
        for pair in zip((*second.engine.parameters, *second.parameters), first.parameters * 2, strict=True):
            pair[0].copy_(pair[1])
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.plain.load_state_dict(deepcopy(first.optimizer.state_dict()))
    for pair in (first, second):
        pair.step(random_gradients(2))
        pair.check()
    same(first.optimizer.state_dict(), second.optimizer.state_dict())
