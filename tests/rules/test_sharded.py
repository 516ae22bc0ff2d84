"""Programs of sharded updates: right in every overlap, as they are drawn; wrong ones are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import StepError, UsageError
from unisono.placement import one_rank_per_node
from unisono.rules import Sharded, sharded
from unisono.rules.sharded import UNPACK, UPDATE_SHARD
from unisono.schedules import find
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Layout, Updates, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict
from unisono.step.program import Step, StepProgram
from unisono.step.verify import verify
from unisono.view.step import draw, picture_of


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_programs_are_right(overlap: str, ranks: int) -> None:
    for buckets, updates in zip((5, 2, 1), Updates, strict=True):
        for clip, norms in ((None, False), (1.0, False), (None, True), (1.0, True)):
            layout = replace(
                even_layout(ranks, buckets),
                updates=updates,
                deferred=updates is not Updates.OUTSIDE,
                clip=clip,
                layer_norms=norms,
                buffers=bool(buckets % 2),
            )
            steps = [Step(0), Step(1, synchronize=False), Step(2), Step(3)]
            verify(Sharded(overlap=overlap), layout, steps, seed=buckets)


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(sorted(OVERLAPS)), st.booleans(), st.data())
def test_programs_are_right_in_any_order_of_halves(
    ranks: int, buckets: int, overlap: str, buffers: bool, data: st.DataObject
) -> None:
    halves = data.draw(st.permutations(2 * [*range(1, buckets + 1)]))
    order = {key: place for place, key in enumerate(dict.fromkeys(halves), 1)}  # keys are in the order of exchange
    layout = replace(even_layout(ranks, buckets), halves=tuple(order[key] for key in halves), buffers=buffers)
    verify(Sharded(overlap=overlap), layout, [Step(0), Step(1, synchronize=False), Step(2), Step(3)], seed=buckets)
    tasks = [task for task in Sharded()(Step(0), 0, layout) if task.operation.name in ("reduce_scatter", "all_gather")]
    assert tuple(task.key for task in tasks) == layout.halves


def test_halves_of_a_layout_wait_where_updates_need_all_gradients() -> None:
    layout = replace(even_layout(2, 2), halves=(1, 1, 2, 2))
    for changes in ({"clip": 1.0}, {"layer_norms": True}, {"updates": Updates.OUTSIDE, "deferred": False}):
        program = Sharded()(Step(0), 0, replace(layout, **changes))
        names = [task.operation.name for task in program]
        assert names.index("all_gather") > max(at for at, name in enumerate(names) if name == "reduce_scatter")
        verify(Sharded(), replace(layout, **changes), [Step(0), Step(1)])


@dataclass(frozen=True)
class Broken(Sharded):
    """Sharded without the tasks of this name, or with its first in the place of the second."""

    missing: str = ""
    instead: tuple[str, str] = ("", "")

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        program = [task for task in super().__call__(event, rank, layout) if task.operation.name != self.missing]
        if self.instead[0]:
            first, second = (
                next(place for place, task in enumerate(program) if str(task) == name) for name in self.instead
            )
            program[first], program[second] = program[second], program[first]
        return tuple(program)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Broken(missing="update"), "all_gather 1 needs an updated shard in bucket 1, which holds a shard"),
        (Broken(missing="all_gather"), "unpack 1 needs gathered weights in bucket 1, which holds an updated shard"),
        (
            Broken(missing="unpack"),
            "overwrites updated weights that were not unpacked|a value orders them|were not unpacked",
        ),
        (
            Broken(missing="grad_input"),
            "unpack 1 changes the weights of parameter 0, which the backward pass may",
        ),
        (Broken(missing="reduce_scatter"), "update 1 needs a shard of summed gradients in bucket 1"),
        (Broken(missing="pack"), "reduce_scatter 1 needs gradients in bucket 1, which holds nothing"),
        (Broken(instead=("update 1", "reduce_scatter 1")), "update 1 needs a shard of summed gradients in bucket 1"),
        (
            Broken(instead=("all_gather 1", "update 1")),
            "all_gather 1 needs an updated shard in bucket 1, which holds a shard",
        ),
    ],
)
def test_wrong_programs_are_refused(rule: Broken, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(rule, even_layout(3, 1), [Step(0), Step(1)])


def test_norms_are_taken_of_all_buckets() -> None:
    rule = Broken(instead=("clip 0", "reduce_scatter 2"))
    with pytest.raises(StepError, match="clip 0 needs a shard of summed gradients in bucket 2, which holds gradients"):
        verify(rule, replace(even_layout(2, 2), clip=1.0), [Step(0)])


def test_the_picture_is_the_one_that_is_drawn() -> None:
    drawn = draw(picture_of(Sharded(overlap="chain"), even_layout(4, 2), 2))
    lines = [line.rstrip() for line in drawn.splitlines()]
    assert "\n".join(lines) in (sharded.__doc__ or "")
    page = (Path(__file__).parents[2] / "docs/rules.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {line}".rstrip() for line in lines) in page


def test_the_bytes_and_rounds_of_the_docstring() -> None:
    """On a link where only bytes cost: each half of an allreduce's 1.5 n on 4 ranks; clipping costs none."""
    assert "0.75 n bytes on each rank" in (sharded.__doc__ or "").replace("\n", " ")
    layout = even_layout(4, 8)
    nbytes = sum(bucket.nbytes for bucket in layout.buckets)
    computing = Computing(tuple(map(float, range(8))), tuple(map(float, range(16, 8, -1))), 16.0, 1.0 / nbytes)
    costs = Costs(layout, computing, Cost(0.0, 1.5 / nbytes))
    assert predict(Sharded(), costs).communicating == pytest.approx(1.5)
    assert predict(Sharded(clip=1.0), costs).communicating == pytest.approx(1.5)
    program = Sharded()(Step(0), 0, layout)
    for name, share in (("reduce_scatter", 0.75), ("all_gather", 0.75), ("update", 0.25)):
        prices = [task.operation.price(task, costs).seconds for task in program if task.operation.name == name]
        assert sum(prices) == pytest.approx(share)
    assert "1 + 1, by `ring` 3 + 3" in (sharded.__doc__ or "")
    for algorithm, rounds in (("direct", 1), ("ring", 3)):
        family = find(algorithm, one_rank_per_node(4))
        for schedule in (family.reduce_scatter, family.all_gather):
            assert schedule is not None
            assert max(len(lane) for lane in schedule(0, 4).lanes) == rounds


def test_weights_of_first_layers_are_gathered_first() -> None:
    program = Sharded()(Step(0), 0, even_layout(4, 3))
    assert [task.key for task in program if task.operation.name == "all_gather"] == [3, 2, 1]
    assert [task.key for task in program if task.operation is UNPACK] == [3, 2, 1]
    assert [task.key for task in program if task.operation is UPDATE_SHARD] == [1, 2, 3]


def test_a_norm_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Sharded\(clip=0\): the norm must be above 0, or None"):
        Sharded(clip=0)


def test_the_optimizer_of_an_own_loop_steps_after_the_backward_pass() -> None:
    layout = replace(even_layout(2, 3), updates=Updates.OUTSIDE, deferred=False, clip=1.0)
    names = [task.operation.name for task in Sharded()(Step(0), 0, layout)]
    assert (
        names.index("end")
        < names.index("step")
        < names.index("agree_on_step")
        < names.index("clip")
        < names.index("update")
    )
    assert max(at for at, name in enumerate(names) if name == "grad_input") < names.index("end")
